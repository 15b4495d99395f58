"""Starting the processes of a job. Stands on the settings alone; never imports torch."""
