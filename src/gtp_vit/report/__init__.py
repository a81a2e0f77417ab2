"""Results as rows, tables, sentences, plots, pictures and pages, for the command line and any other front end."""
