//! The server: accepts connections on loopback and passes their requests to S3 or to a fault until it is
//! stopped.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use s3s::service::S3Service;
use s3s::{Body, HttpResponse};
use tokio::net::{TcpListener, TcpStream};

use crate::faults::Faults;
use crate::operation::Target;
use crate::rule::Kind;
use crate::store::Store;
use crate::wire::{Control, Wire};
use crate::{admin, gcs, spoil};

/// Time for requests in progress to finish after the server was stopped.
const FAREWELL: Duration = Duration::from_secs(2);

/// A listening server.
pub struct Server {
    listener: TcpListener,
    handler: Arc<Handler>,
    port: u16,
}

/// The handler of requests.
pub struct Handler {
    /// The S3 service.
    pub service: S3Service,
    /// The faults to inject.
    pub faults: Arc<Faults>,
    /// The store, if requests use Google's dialect.
    pub google: Option<Arc<Store>>,
}

/// The reason to close a connection without an answer.
#[derive(Debug)]
struct Hangup(&'static str);

impl fmt::Display for Hangup {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.0)
    }
}

impl Error for Hangup {}

impl Server {
    /// Listens on `port` of 127.0.0.1; 0 selects a free port.
    ///
    /// # Errors
    /// The port is in use.
    pub async fn bind(port: u16, handler: Handler) -> io::Result<Self> {
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
            handler: Arc::new(handler),
            port,
        })
    }

    /// Returns the port it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Serves until `stop` completes; requests in progress then get [`FAREWELL`] to finish.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send) {
        let graceful = GracefulShutdown::new();
        tokio::pin!(stop);
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) => self.start(stream, &graceful),
                    // Either the process is out of file descriptors or the client is gone; neither stops the
                    // server.
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
        let (handler, control) = (self.handler.clone(), Arc::new(Control::default()));
        handler.faults.connections.fetch_add(1, Ordering::Relaxed);
        control
            .bandwidth
            .store(handler.faults.bandwidth(), Ordering::Relaxed);
        let wire = Wire::new(stream, control.clone(), handler.faults.clone());
        let handle = service_fn(move |request| {
            let (handler, control) = (handler.clone(), control.clone());
            async move { handler.handle(request, &control).await }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .serve_connection(TokioIo::new(wire), handle);
        let connection = graceful.watch(connection);
        // An error is either an injected fault or caused by the client, which disconnected or did not send
        // valid HTTP.
        tokio::spawn(async move { drop(connection.await) });
    }
}

impl Handler {
    async fn handle(
        &self,
        request: Request<Incoming>,
        control: &Control,
    ) -> Result<HttpResponse, Hangup> {
        if let Some(what) = request.uri().path().strip_prefix("/_s3d/") {
            let what = what.to_owned();
            return Ok(admin::handle(&self.faults, &what, request).await);
        }
        let _entered = self.faults.enter();
        let target = Target::of(&request);
        let fate = self.faults.decide(&target);
        control.bandwidth.store(fate.bandwidth, Ordering::Relaxed);
        tokio::time::sleep(fate.delay).await;
        match fate.fault {
            Some(Kind::Reset) => {
                control.is_reset.store(true, Ordering::Relaxed);
                Err(Hangup("reset, as asked"))
            }
            Some(Kind::LostReply) => {
                self.carry_out(request).await?;
                Err(Hangup("reply lost, as asked"))
            }
            Some(Kind::ShortBody) => spoil::shorten(self.carry_out(request).await?)
                .ok_or(Hangup("a body of no bytes cannot be shorter")),
            Some(kind) => {
                drain(request).await;
                Ok(spoil::refusal(kind))
            }
            None => self.carry_out(request).await,
        }
    }

    async fn carry_out(&self, mut request: Request<Incoming>) -> Result<HttpResponse, Hangup> {
        if let Some(store) = &self.google
            && let Err(response) = gcs::to_s3(store, &mut request)
        {
            drain(request).await;
            self.faults.answer(response.status());
            return Ok(*response);
        }
        let answer = self.service.call(request.map(Body::from)).await;
        let mut response = answer.map_err(|_| Hangup("not a request that S3 could answer"))?;
        if self.google.is_some() {
            gcs::add_generation(response.headers_mut());
        }
        self.faults.answer(response.status());
        Ok(response)
    }
}

/// Reads a body to its end: a response before that looks like a reset to a client that is still sending.
async fn drain(request: Request<Incoming>) {
    let mut body = request.into_body();
    while let Some(Ok(_)) = body.frame().await {}
}
