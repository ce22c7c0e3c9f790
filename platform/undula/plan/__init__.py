"""The logical run: what each step consumes, at which learning rate, whatever the cluster. Pure: no Ray, no boto3, no I/O."""
