"""Workers that come and go: trainers on Ray Train. All private API of Ray is used here and nowhere else."""
