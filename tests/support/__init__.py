"""What the tests of all packages share: ranks, leak checks, sampling of slow tests, a local S3 server."""
