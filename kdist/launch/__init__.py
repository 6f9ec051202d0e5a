"""Starting the tasks of a job."""
