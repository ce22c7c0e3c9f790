"""Tests of `ray up`, the launches of the autoscaler, and `ray down`, with cluster.yaml against moto's EC2 in a separate process.

Ray's launcher, provider and node updater, boto3 and all requests are real. EC2 is simulated by moto, which does not resolve the SSM
parameter of an image. The machines are simulated by stand-ins for `ssh` and `rsync`, which record their arguments and copy the files into
one folder for each host.
"""

import base64
import json
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import boto3
import pytest
import yaml
from waiting import wait_until

ROOT = Path(__file__).parents[2]
CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
TYPES = CLUSTER["available_node_types"]
WORKERS = [name for name in TYPES if name != CLUSTER["head_node_type"]]
INSTALLED = "spot-g6-xlarge"
"""Worker type of which one node is also set up."""
LIMIT_S = 300.0
pytestmark = pytest.mark.nightly
STAND_IN = """#!{python}
import fnmatch, json, pathlib, shutil, sys
hosts = pathlib.Path({hosts!r})
with open(hosts / "commands", "a") as record:
    record.write(json.dumps([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]) + "\\n")
if sys.argv[0].endswith("rsync"):
    source, (host, _, path) = pathlib.Path(sys.argv[-2]), sys.argv[-1].partition("@")[2].partition(":")
    target = hosts / host / path.removeprefix("~/")
    target.parent.mkdir(parents=True, exist_ok=True)
    excluded = [value for option, value in zip(sys.argv, sys.argv[1:]) if option == "--exclude"]
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*excluded), dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)
"""
AWS = """#!{python}
import pathlib, sys
import boto3
service, command, *options = sys.argv[1:]
given = dict(zip([name.removeprefix("--") for name in options[::2]], options[1::2], strict=True))
client = boto3.client({{"s3api": "s3"}}.get(service, service), region_name=given.pop("region", "us-east-1"))
operation = next(name for name in client.meta.method_to_api_mapping if name == command.replace("-", "_"))
members = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation]).input_shape.members
for name, value in given.items():
    field = next(each for each in members if each.lower() == name.replace("-", ""))
    if value.startswith("file://"):
        value = pathlib.Path(value.removeprefix("file://")).read_text()
    given[name] = field, dict([value.split("=")]) if members[field].type_name == "structure" else value
getattr(client, operation)(**dict(given.values()))
"""
"""Stand-in for the parts of the AWS command line that docs/spot.md uses, based on boto3's models of the services."""


@dataclass(frozen=True)
class Story:
    """Record of a cluster from `ray up` to `ray down`."""

    home: Path
    """Home directory of the user who called `ray up`."""
    hosts: Path
    """Folder with one home directory for each machine, named by its address."""
    head: Mapping[str, Any]
    """Description by EC2."""
    groups: list[dict[str, Any]]
    launches: Mapping[str, Mapping[str, str]]
    """Parameters of RunInstances by node type."""
    workers: list[dict[str, Any]]
    worker: str
    """Address of the worker that was set up."""
    actions_of_head: set[str]
    """Requests of the autoscaler to EC2."""
    commands: list[list[str]]
    policies: Mapping[str, set[str]]
    """Actions that the policies of each role allow."""
    buckets: list[str]
    left: list[str]
    """States of all instances after `ray down`."""

    def shell(self, host: str) -> list[str]:
        """Return the scripts that the shell of a machine received."""
        calls = [command for command in self.commands if command[0] == "ssh" and f"ubuntu@{host}" in command]
        return [shlex.split(" ".join(command[command.index(f"ubuntu@{host}") + 1 :]))[-1] for command in calls]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("ray-up")
    home, hosts, bin_folder = folder / "home", folder / "hosts", folder / "bin"
    for created in (home, hosts, bin_folder):
        created.mkdir()
    for name, program in {"ssh": STAND_IN, "rsync": STAND_IN, "aws": AWS}.items():
        (bin_folder / name).write_text(program.format(python=sys.executable, hosts=str(hosts)))
        (bin_folder / name).chmod(0o755)
    requests = folder / "requests"
    with moto_server(requests) as endpoint, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "RAY_"))]:
            patch.delenv(name)
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("HOME", str(home))
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
        yield tell(patch, home, hosts, requests)


def tell(patch: pytest.MonkeyPatch, home: Path, hosts: Path, requests: Path) -> Story:
    ec2, iam = (boto3.client(name, region_name=CLUSTER["provider"]["region"]) for name in ("ec2", "iam"))
    run_the_commands_of_the_docs()
    previous = os.umask(0o077)  # the umask decides who can read the token that Ray writes
    ray("get-auth-token", "--generate")
    os.umask(previous)
    ray("up", "-y", "--no-config-cache", "cluster.yaml")
    (head,) = instances(ec2)
    groups = ec2.describe_security_groups()["SecurityGroups"]

    before = len(read(requests))
    patch.setenv("HOME", str(hosts / head["PublicIpAddress"]))  # the following requests come from the head
    worker = launch_and_set_up(head["PrivateIpAddress"])
    actions = {request["Action"] for request in read(requests)[before:]}
    workers = [instance for instance in instances(ec2) if instance["InstanceId"] != head["InstanceId"]]

    patch.setenv("HOME", str(home))
    ray("down", "-y", "cluster.yaml")
    launches = [request for request in read(requests) if request["Action"] == "RunInstances"]
    return Story(
        home, hosts, head, groups, {tags(request)["ray-user-node-type"]: request for request in launches}, workers, worker, actions,
        [json.loads(line) for line in (hosts / "commands").read_text().splitlines()],
        {role: set(iam.list_role_policies(RoleName=role)["PolicyNames"]) for role in ("undula-head", "undula-worker")},
        [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]],
        [instance["State"]["Name"] for instance in instances(ec2)],
    )  # fmt: skip


def launch_and_set_up(head_ip: str) -> str:
    """Launch one worker of each type, as the autoscaler on the head does, set up one of them, and return its address."""
    from ray.autoscaler._private.providers import _get_node_provider
    from ray.autoscaler.v2.instance_manager.config import FileConfigReader
    from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter
    from ray.autoscaler.v2.instance_manager.ray_installer import RayInstaller
    from ray.core.generated.instance_manager_pb2 import Instance

    reader = FileConfigReader(str(Path.home() / "ray_bootstrap_config.yaml"))
    config = reader.get_cached_autoscaling_config()
    provider = _get_node_provider(config.get_provider_config(), config.get_config("cluster_name"))
    adapter = NodeProviderAdapter(provider, reader)
    adapter.launch(dict.fromkeys(WORKERS, 1), request_id="one of each")
    wait_until(lambda: len(adapter.get_non_terminated()) == 1 + len(WORKERS))
    assert not adapter.poll_errors()
    of_type = {instance.node_type: name for name, instance in adapter.get_non_terminated().items()}
    instance = Instance(instance_id="1", cloud_instance_id=of_type[INSTALLED], instance_type=INSTALLED)
    RayInstaller(provider, config).install_ray(instance, head_ip)
    return str(provider.internal_ip(of_type[INSTALLED]))


def test_the_head_is_on_demand_with_its_own_profile_and_an_encrypted_disk(story: Story) -> None:
    sent = story.launches["head"]
    assert story.head["InstanceType"] == sent["InstanceType"] == "r6i.large"
    assert "InstanceLifecycle" not in story.head
    assert not [name for name in sent if name.startswith("InstanceMarketOptions")]
    assert story.head["IamInstanceProfile"]["Arn"].endswith("instance-profile/undula-head")
    assert story.head["MetadataOptions"]["HttpTokens"] == "required"
    assert sent["BlockDeviceMapping.1.Ebs.Encrypted"] == "true"
    assert sent["ImageId"].startswith(
        "resolve:ssm:/aws/service/canonical/ubuntu/"
    )  # EC2 resolves it, and Ray passes it on unchanged


def test_the_documented_commands_create_a_bucket_and_two_roles_one_of_which_can_launch_nodes(story: Story) -> None:
    assert story.policies == {"undula-head": {"bucket", "workers"}, "undula-worker": {"bucket"}}
    assert story.buckets == ["your-bucket"]
    worker = json.loads((ROOT / "docs" / "iam" / "worker-policy.json").read_text())
    assert {statement["Resource"].partition("/")[0] for statement in worker["Statement"]} == {
        "arn:aws:s3:::YOUR-BUCKET"
    }


def test_nothing_but_ssh_is_open_to_the_world(story: Story) -> None:
    assert [group["GroupName"] for group in story.head["SecurityGroups"]] == ["undula"]
    (group,) = [group for group in story.groups if group["GroupName"] == "undula"]
    to_all = [rule for rule in group["IpPermissions"] if rule["IpRanges"] or rule["Ipv6Ranges"]]
    assert [(rule["FromPort"], rule["ToPort"], rule["IpProtocol"]) for rule in to_all] == [(22, 22, "tcp")]
    (within,) = [rule for rule in group["IpPermissions"] if rule not in to_all]
    assert [pair["GroupId"] for pair in within["UserIdGroupPairs"]] == [group["GroupId"]]


@pytest.mark.parametrize("name", WORKERS)
def test_each_type_of_worker_is_launched_with_its_configuration(story: Story, name: str) -> None:
    sent, wanted = story.launches[name], TYPES[name]["node_config"]
    assert sent["InstanceType"] == wanted["InstanceType"]
    assert sent["IamInstanceProfile.Name"] == "undula-worker"
    assert sent["MetadataOptions.HttpTokens"] == "required"
    assert sent["BlockDeviceMapping.1.Ebs.Encrypted"] == "true"
    assert sent["ImageId"] == wanted["ImageId"]
    market = {key.rpartition(".")[2]: value for key, value in sent.items() if key.startswith("InstanceMarketOptions")}
    if name.startswith("spot-"):
        assert market == {"MarketType": "spot", **wanted["InstanceMarketOptions"]["SpotOptions"]}
        assert market["MaxPrice"]
    else:
        assert market == {}
    assert tags(sent)["ray-cluster-name"] == "undula"  # the policy of the head depends on it
    assert tags(sent)["ray-node-type"] == "worker"


def test_workers_start_in_the_zones_and_the_security_group_of_the_cluster(story: Story) -> None:
    zones = CLUSTER["provider"]["availability_zone"].split(",")
    assert len(story.workers) == len(WORKERS)
    assert {worker["Placement"]["AvailabilityZone"] for worker in story.workers} <= set(zones)
    assert {group["GroupName"] for worker in story.workers for group in worker["SecurityGroups"]} == {"undula"}
    spot = [worker for worker in story.workers if worker.get("InstanceLifecycle") == "spot"]
    assert len(spot) == sum(name.startswith("spot-") for name in WORKERS)
    config = yaml.safe_load((story.hosts / story.head["PublicIpAddress"] / "ray_bootstrap_config.yaml").read_text())
    subnets = {len(node_type["node_config"]["SubnetIds"]) for node_type in config["available_node_types"].values()}
    assert subnets == {len(zones)}  # the provider tries them all


def test_the_policy_of_the_head_allows_all_of_its_requests(story: Story) -> None:
    policy = json.loads((ROOT / "docs" / "iam" / "head-policy.json").read_text())
    actions = [statement["Action"] for statement in policy["Statement"]]
    allowed = {name for action in actions for name in ([action] if isinstance(action, str) else action)}
    assert {"RunInstances", "CreateTags"} <= story.actions_of_head
    assert {f"ec2:{action}" for action in story.actions_of_head} <= allowed
    assert not [name for name in allowed if "*" in name]
    (passing,) = [statement for statement in policy["Statement"] if statement["Action"] == "iam:PassRole"]
    assert passing["Resource"].endswith(":role/undula-worker")


def test_head_and_workers_have_the_token_before_ray_starts(story: Story) -> None:
    token = (story.home / ".ray" / "auth_token").read_text()
    assert len(token) >= 32
    for host in (story.head["PublicIpAddress"], story.worker):
        copied = story.hosts / host / ".ray" / "auth_token"
        assert copied.read_text() == token
        assert stat.S_IMODE(copied.stat().st_mode) & 0o077 == 0
        assert token not in " ".join(story.shell(host))
        assert "chmod 600 ~/.ray/auth_token" in " ".join(story.shell(host))
        starts = [script for script in story.shell(host) if "ray start" in script]
        assert starts
        assert all("RAY_AUTH_MODE=token ray start" in script for script in starts)
    assert token not in (story.hosts / story.head["PublicIpAddress"] / "ray_bootstrap_config.yaml").read_text()


def test_a_worker_installs_the_package_joins_the_head_with_its_labels_and_starts_the_watcher(story: Story) -> None:
    ran = story.shell(story.worker)
    steps = [
        "uptime",
        "pip install",
        "~/.bashrc ||",
        "undula-spot-watch.service /etc/systemd",
        "ray stop",
        "ray start",
        "systemctl restart",
    ]
    places = [max(i for i, script in enumerate(ran) if step in script) for step in steps]
    assert places == sorted(places)
    assert (
        sum("pip install" in script for script in ran) == 2
    )  # Ray merges setup_commands again on the head, so each command must be idempotent
    (start,) = [script for script in ran if "ray start" in script]
    (labels,) = re.findall(r"export RAY_OVERRIDE_LABELS='([^']+)'", start)
    assert json.loads(labels) == TYPES[INSTALLED]["labels"]
    assert f"export RAY_HEAD_IP={story.head['PrivateIpAddress']};" in start
    (resources,) = re.findall(r"export RAY_OVERRIDE_RESOURCES='([^']+)'", start)
    assert json.loads(resources)["GPU"] == 1
    for script in (*ran, *story.shell(story.head["PublicIpAddress"])):
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_the_shell_of_a_node_has_the_environment_that_ray_and_jobs_need(story: Story, tmp_path: Path) -> None:
    (tmp_path / "cloud-init").write_text("#!/bin/sh\ntest \"$*\" = 'query region' && echo us-west-2\n")
    (tmp_path / "cloud-init").chmod(0o755)
    (tmp_path / ".bashrc").write_text("case $- in *i*) ;; *) return;; esac\n")
    (script, *_) = [script for script in story.shell(story.worker) if "~/.bashrc ||" in script]
    env = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for _ in range(2):
        subprocess.run(["bash", "-c", script], env=env, check=True)
    assert (tmp_path / ".bashrc").read_text().count("undula-cluster") == 1
    shown = subprocess.run(
        ["bash", "-c", f"source ~/.bashrc; env; true; {sys.executable} -V"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert {"AWS_REGION=us-west-2", "RAY_AUTH_MODE=token"} <= set(shown)
    assert f"PATH={tmp_path}/venv/bin:{env['PATH']}" in shown


def test_nodes_have_the_labels_of_their_region_and_zone(story: Story, tmp_path: Path) -> None:
    """Prices are looked up by these labels. Ray takes them from the environment of `ray start`, which comes from the machine's metadata."""
    query = "case \"$*\" in 'query region') echo us-west-2;; 'query availability_zone') echo us-west-2b;; esac"
    spec = "from ray._private.resource_and_label_spec import ResourceAndLabelSpec as Spec"
    show = f"import json; {spec}; print(json.dumps(Spec._get_default_labels(None)))"
    for name, program in {"cloud-init": f"#!/bin/sh\n{query}\n", "ray": f"#!{sys.executable}\n{show}\n"}.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".bashrc").touch()
    env = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for host in (story.head["PublicIpAddress"], story.worker):
        (start,) = [script for script in story.shell(host) if "ray start" in script]
        shown = subprocess.run(["bash", "-c", start], env=env, capture_output=True, text=True, check=True).stdout
        labels = json.loads(shown.splitlines()[-1])
        assert labels["ray.io/availability-region"] == "us-west-2"
        assert labels["ray.io/availability-zone"] == "us-west-2b"


def test_the_watcher_is_an_undula_command_and_runs_as_the_user_of_the_nodes(story: Story) -> None:
    from undula.cli.spot import watch

    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(story.hosts / story.worker / "undula" / "docs" / "undula-spot-watch.service")
    service = unit["Service"]
    assert service["User"] == CLUSTER["auth"]["ssh_user"]
    program, *arguments = service["ExecStart"].split()
    assert program == f"/home/{service['User']}/venv/bin/undula"
    assert arguments[:2] == ["spot", "watch"]
    assert watch.make_context("watch", arguments[2:]).params["cluster"] == "auto"
    assert service["Restart"] == "always"


def test_the_copied_files_are_an_installable_package(story: Story, tmp_path: Path) -> None:
    package = story.hosts / story.worker / "undula"
    assert {file.name for file in package.iterdir()} == {
        "platform",
        "docs",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
    }
    assert not list(package.rglob("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        str(package),
    ]
    subprocess.run(command, check=True)
    assert [wheel.name.partition("-")[0] for wheel in tmp_path.iterdir()] == ["undula"]


def test_ray_down_leaves_no_instance(story: Story) -> None:
    assert story.left == ["terminated"] * (1 + len(WORKERS))


@contextmanager
def moto_server(requests: Path) -> Iterator[str]:
    """Address of the server, which records every request."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "MOTO_ENABLE_RECORDING": "1", "MOTO_RECORDER_FILEPATH": str(requests)}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=LIMIT_S)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def ray(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_the_commands_of_the_docs() -> None:
    """Run the commands of docs/spot.md that create the bucket and the profiles, with a stand-in for `aws`."""
    commands = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "spot.md").read_text(), re.DOTALL)
    (own,) = [command for command in commands if "aws iam create-role" in command]
    done = subprocess.run(["bash", "-e", "-c", own], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def read(requests: Path) -> list[dict[str, str]]:
    """Return the parameters of each request to EC2."""
    bodies = [base64.b64decode(json.loads(line)["body"]).decode() for line in requests.read_text().splitlines()]
    return [
        parameters
        for parameters in (dict(parse_qsl(body)) for body in bodies)
        if parameters.get("Version") == "2016-11-15"
    ]


def instances(ec2: Any) -> list[dict[str, Any]]:
    return [instance for group in ec2.describe_instances()["Reservations"] for instance in group["Instances"]]


def tags(sent: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of the instances that RunInstances creates."""
    keys = [name for name in sent if re.fullmatch(r"TagSpecification\.1\.Tag\.\d+\.Key", name)]
    return {sent[key]: sent[f"{key.removesuffix('Key')}Value"] for key in keys}
