"""Where weights come from: one module for each kind of source, each imported when it is used."""
