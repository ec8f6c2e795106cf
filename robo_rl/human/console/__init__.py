"""The web page from which operators watch robots, take over and teach."""
