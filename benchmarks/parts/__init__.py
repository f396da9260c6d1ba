"""What several rows share: the rivals, the way of measuring, the page."""
