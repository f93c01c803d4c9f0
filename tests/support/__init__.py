"""Support for the tests of all packages: ranks, leak checks, sampling of slow tests, a local S3 server."""
