"""Models that come with a package, so that the first start needs no model hub."""
