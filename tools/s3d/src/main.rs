//! A local S3 server with fault injection, for tests and development.
//!
//! `cargo run -p s3d -- --root DIR` serves one folder on loopback and prints the variables that configure a
//! client for it. It supports S3 with signatures, ranges, ETags, conditional writes, multipart uploads and
//! checksums. Conditions are checked and changes made under one lock, so exactly one of several conditional
//! writers succeeds. Nothing is synced to disk: data survives a kill of the server, but not a crash of the
//! machine.

mod admin;
mod auth;
mod blobs;
mod faults;
mod gcs;
mod journal;
mod listing;
mod multipart;
mod objects;
mod operation;
mod pages;
mod pieces;
mod rule;
mod server;
mod service;
mod spoil;
mod store;
mod wire;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use s3s::service::S3ServiceBuilder;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};

use crate::auth::Keys;
use crate::faults::{Faults, Settings};
use crate::service::Service;
use crate::store::Store;

/// A local S3 server with faults on request, for tests and development.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The folder to serve; created if it is not there
    #[arg(long)]
    root: PathBuf,
    /// The port on 127.0.0.1; 0 selects a free port, which is printed in one line of JSON
    #[arg(long, default_value_t = 9123)]
    port: u16,
    /// The access key that clients sign with
    #[arg(long, default_value = "hocket")]
    access_key: String,
    /// The secret key that clients sign with
    #[arg(long, default_value = "hocket-secret")]
    secret_key: String,
    /// Accept access keys of the form `{access-key}-{ms}`, which expire that many milliseconds after 1970
    #[arg(long)]
    keys_expire: bool,
    /// Accept only unsigned requests; signed requests are rejected
    #[arg(long, conflicts_with = "keys_expire")]
    anonymous: bool,
    /// Speak Google's XML API instead of S3's; tokens are not checked
    #[arg(long, conflicts_with_all = ["keys_expire", "anonymous"])]
    gcs: bool,
    /// A bucket that is created at the start
    #[arg(long, default_value = "hocket")]
    bucket: String,
    /// A fault, `kind=slowdown,rate=0.05,op=GetObject,key=*/data/*`; may be given several times.
    ///
    /// Kinds: latency (with ms=), bandwidth (with bytes_per_s=), 500, slowdown (a 503), conflict (a 409), reset,
    /// short_body, lost_reply, no_conditions, bad_condition, html, error_body, moved, skewed.
    /// All else may be left out: rate (1), op and key (any; `*` and `?` are wild, `|` separates operations),
    /// after (0: how many matching requests are left alone first), times (how many are hit at most).
    #[arg(long = "fault", value_name = "RULE")]
    faults: Vec<String>,
    /// The seed that determines which matching requests a fault hits
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Latency of every request in milliseconds
    #[arg(long, default_value_t = 0)]
    latency_ms: u64,
    /// Bandwidth of every connection in each direction, in bytes per second; 0 is unlimited
    #[arg(long, default_value_t = 0)]
    bandwidth: u64,
    /// Stop when the standard input closes, so that the server does not outlive the test run that started it
    #[arg(long)]
    until_stdin_closes: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(Into::into)
        .and_then(|runtime| runtime.block_on(run(arguments)));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("s3d: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    if !s3s::path::check_bucket_name(&arguments.bucket) {
        return Err(format!(
            "`{}` is no name for a bucket; give another --bucket",
            arguments.bucket
        )
        .into());
    }
    let faults = Arc::new(Faults::default());
    faults.set(Settings {
        faults: arguments.faults.clone(),
        seed: arguments.seed,
        latency_ms: arguments.latency_ms,
        bandwidth: arguments.bandwidth,
    })?;
    let store = Arc::new(Store::open(&arguments.root)?);
    store.create_bucket(&arguments.bucket)?;
    let mut builder = S3ServiceBuilder::new(Service(store.clone()));
    if !(arguments.anonymous || arguments.gcs) {
        builder.set_auth(Keys {
            access_key: arguments.access_key.clone(),
            secret_key: arguments.secret_key.clone(),
            expire: arguments.keys_expire,
        });
    }
    let handler = server::Handler {
        service: builder.build(),
        faults,
        google: arguments.gcs.then_some(store),
    };
    let server = server::Server::bind(arguments.port, handler).await?;
    // From here on a signal is a request to stop; the reader of the announcement may send one.
    let stop = stop(arguments.until_stdin_closes)?;
    announce(&arguments, server.port())?;
    server.serve(stop).await;
    Ok(())
}

fn announce(arguments: &Arguments, port: u16) -> Result<(), Box<dyn Error>> {
    use std::io::Write;

    let endpoint = format!("http://127.0.0.1:{port}");
    let (access_key, secret_key) = (&arguments.access_key, &arguments.secret_key);
    let mut out = std::io::stdout().lock();
    if arguments.port == 0 {
        let line = serde_json::json!({
            "endpoint": endpoint, "bucket": arguments.bucket, "access_key": access_key, "secret_key": secret_key,
        });
        writeln!(out, "{line}")?;
    } else if arguments.gcs {
        writeln!(out, "export STORAGE_EMULATOR_HOST={endpoint}")?;
        writeln!(
            out,
            "# serving gs://{}; paste the line above; Ctrl-C ends it",
            arguments.bucket
        )?;
    } else {
        writeln!(out, "export AWS_ENDPOINT_URL={endpoint}")?;
        writeln!(out, "export AWS_ACCESS_KEY_ID={access_key}")?;
        writeln!(out, "export AWS_SECRET_ACCESS_KEY={secret_key}")?;
        writeln!(
            out,
            "export AWS_REGION=us-east-1 AWS_DEFAULT_REGION=us-east-1"
        )?;
        writeln!(
            out,
            "# serving s3://{}; paste the lines above; Ctrl-C ends it",
            arguments.bucket
        )?;
    }
    out.flush()?;
    Ok(())
}

/// Completes with the first reason to stop.
fn stop(until_stdin_closes: bool) -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = stdin_closed(), if until_stdin_closes => {}
        }
    })
}

async fn stdin_closed() {
    let mut stdin = tokio::io::stdin();
    let mut ignored = [0; 256];
    while stdin.read(&mut ignored).await.is_ok_and(|count| count > 0) {}
}
