"""The version, which the package, the command line and the service have from here."""

__version__ = "0.1.0"
