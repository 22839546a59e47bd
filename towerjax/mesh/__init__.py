"""The devices of towers and values, their placement, and the processes of a job."""
