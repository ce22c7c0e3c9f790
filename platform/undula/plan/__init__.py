"""The logical run: the samples and the learning rate of each step, independent of the cluster. Pure: no Ray, no boto3, no I/O."""
