"""Images and audio of a request: fetched where that is allowed, decoded and bounded before anything else sees them."""
