"""Work on patches as on ordinary commits: open the series as a git tree, write it back, start a fix."""
