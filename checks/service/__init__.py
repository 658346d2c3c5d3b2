"""Long checks of the running service, from outside: real clients, fuzzing, overload."""
