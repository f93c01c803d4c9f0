//! A local S3 server with faults on request.

fn main() {}
