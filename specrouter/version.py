"""The version, for the package, the command line and the service."""

__version__ = "0.1.0"
