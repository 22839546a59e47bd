"""Many results of one kind: a grid, trainings, a file that resumes, a table."""
