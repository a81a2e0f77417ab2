"""Images, prepared as a model wants them: files, folders, data sets and tar files."""
