"""A study of learning rate and batch size: trains the job that the study names, as often as it says.

undula study jobs/lr_study_sgd.yaml
ray job submit --address http://HEAD:8265 --runtime-env jobs/runtime_env.yaml -- python jobs/lr_study.py jobs/lr_study_sgd.yaml
"""

import undula

if __name__ == "__main__":
    undula.study_main()
