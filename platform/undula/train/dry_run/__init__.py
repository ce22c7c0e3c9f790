"""Steps of a job that nothing commits: rehearsals, which compile the model, and counts of memory and computation."""
