"""Tests of the configuration of Horovod for a group. They are pure and do not need Horovod."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from undula.elastic.pure.spec import HorovodSpec
from undula.elastic.ray.horovod import HorovodConfig, interface_of, places
from undula.errors import ClusterError


def numbers(place: dict[str, str], *names: str) -> tuple[int, ...]:
    return tuple(int(place[f"HOROVOD_{name}"]) for name in names)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_every_rank_has_its_own_place(hosts: list[str]) -> None:
    placed = places(hosts)
    assert [numbers(place, "RANK", "SIZE") for place in placed] == [(rank, len(hosts)) for rank in range(len(hosts))]
    for host, count in Counter(hosts).items():
        here = [place for place in placed if place["HOROVOD_HOSTNAME"] == host]
        assert [numbers(place, "LOCAL_RANK", "LOCAL_SIZE") for place in here] == [
            (rank, count) for rank in range(count)
        ]
    for local_rank in range(max(Counter(hosts).values())):
        across = [place for place in placed if numbers(place, "LOCAL_RANK") == (local_rank,)]
        assert [numbers(place, "CROSS_RANK", "CROSS_SIZE") for place in across] == [
            (rank, len(across)) for rank in range(len(across))
        ]


def test_the_interface_is_that_of_gloo_or_the_first_configured_one_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    here: dict[str, Any] = {"lo": (), "eth7": ()}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert interface_of(None, here) == "eth7"
    assert interface_of(("ib0", "lo"), here) == "lo"
    with pytest.raises(
        ClusterError, match=r"no network interface ib0 or ib1; set horovod\.nics to .* \(here: eth7, lo\)"
    ):
        interface_of(("ib0", "ib1"), here)


def test_fields_become_environment_variables_except_those_that_autotune_sets() -> None:
    plain = HorovodSpec().variables("now", has_gpus=True)
    assert plain["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "30"
    assert not {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_TIMELINE"} & plain.keys()
    assert HorovodSpec().variables("now", has_gpus=False)["HOROVOD_CYCLE_TIME"] == "5"
    assert "HOROVOD_CYCLE_TIME" not in HorovodSpec(autotune=True).variables("now", has_gpus=False)
    chosen = HorovodSpec(fusion_threshold_mib=2, cycle_time_ms=0.5, timeline="/tmp/trace.json", stall_check_s=0)
    variables = chosen.variables("20261122-101112", has_gpus=False)
    assert variables["HOROVOD_FUSION_THRESHOLD"] == str(2 * 2**20)
    assert variables["HOROVOD_CYCLE_TIME"] == "0.5"
    assert variables["HOROVOD_TIMELINE"] == "/tmp/trace-20261122-101112.json"
    assert variables["HOROVOD_STALL_CHECK_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"stall_shutdown_s": 30}, "stall_shutdown_s is 30 and stall_check_s is 60"),
        ({"stall_shutdown_s": 30, "stall_check_s": 0}, "stall_check_s above 0"),
        ({"autotune_log": "/tmp/log"}, "autotune_log has no effect without autotune"),
        ({"timeline_mark_cycles": True}, "timeline_mark_cycles has no effect without timeline"),
    ],
)
def test_settings_that_horovod_would_ignore_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        HorovodSpec(**fields)


def test_arguments_of_old_scripts_are_accepted() -> None:
    with pytest.warns(UserWarning, match="verbose, ssh_port"):
        config = HorovodConfig(nics={"eth1", "eth0"}, verbose=2, ssh_port=22, timeout_s=300, key="k")
    assert config.spec.nics == ("eth0", "eth1")
    assert config.spec.timeout_s == 300
    assert "k" not in str(config.to_dict())
    with pytest.raises(ValidationError, match="timeout_s"):
        HorovodConfig(timeout_s=-1)
    with pytest.raises(ValidationError, match="cycle_time"):
        HorovodConfig(cycle_time=1)
