//! Connections: accepted on loopback, served until told to stop.

use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use s3s::service::S3Service;
use tokio::net::{TcpListener, TcpStream};

/// How long requests in flight have to end after the server was told to stop.
const FAREWELL: Duration = Duration::from_secs(2);

/// A listening server.
pub struct Server {
    listener: TcpListener,
    service: S3Service,
    port: u16,
}

impl Server {
    /// Listens on `port` of 127.0.0.1; 0 takes a free one.
    ///
    /// # Errors
    /// The port is taken.
    pub async fn bind(port: u16, service: S3Service) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
            .await
            .map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("port {port} of 127.0.0.1: {error}; give another --port"),
                )
            })?;
        let port = listener.local_addr()?.port();
        Ok(Self {
            listener,
            service,
            port,
        })
    }

    /// The port it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Serves until `stop` ends; then requests in flight get [`FAREWELL`] to end, too.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send) {
        let graceful = GracefulShutdown::new();
        tokio::pin!(stop);
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) => self.start(stream, &graceful),
                    // Out of file descriptors, or the client is gone already: neither ends the server.
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                },
                () = &mut stop => break,
            }
        }
        drop(self.listener);
        let _ = tokio::time::timeout(FAREWELL, graceful.shutdown()).await;
    }

    fn start(&self, stream: TcpStream, graceful: &GracefulShutdown) {
        let _ = stream.set_nodelay(true);
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .serve_connection(TokioIo::new(stream), self.service.clone());
        let connection = graceful.watch(connection);
        // An error is the client's: he hung up, or spoke no HTTP.
        tokio::spawn(async move { drop(connection.await) });
    }
}
