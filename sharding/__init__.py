"""Where every array lives: the device mesh, logical axes, collectives and start-up."""
