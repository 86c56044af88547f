//! Members and clients over turmoil's TCP, with the connections and the services of the server on top.
//!
//! Not here: what the server has between a socket and HTTP/2 for its clients' sake (`serve.rs`), which needs the operating system's sockets.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use ballast_api::ballastpeerpb::peer_server::PeerServer;
use ballast_api::etcdserverpb::kv_server::KvServer;
use ballast_server::config::urls::Url;
use ballast_server::peer::Dial;
use ballast_server::peer::channel::Network;
use ballast_server::rpc::Context;
use ballast_server::rpc::kv::KvService;
use ballast_server::rpc::peer::PeerService;
use ballast_server::serve::stream::Socket;
use futures::future::BoxFuture;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tower::Service;
use turmoil::net::{TcpListener, TcpStream};

use crate::member::ELECTION;

pub(crate) const PORT: u16 = 2380;
const PING_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn url(host: &str) -> String {
    format!("http://{host}:{PORT}")
}

#[derive(Debug)]
struct Simulated;

impl Network for Simulated {
    fn connect<'a>(&'a self, url: &'a Url) -> BoxFuture<'a, io::Result<Socket>> {
        Box::pin(async move {
            let stream = TcpStream::connect(url.address.as_str()).await?;
            Ok(Socket::Other(Box::new(stream)))
        })
    }
}

pub(crate) fn dial() -> Dial {
    Dial {
        network: Arc::new(Simulated),
        ..Dial::new(None, ELECTION)
    }
}

/// Answers members and clients.
pub(crate) async fn serve(context: Arc<Context>) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).await?;
    let peer = PeerServer::new(PeerService(Arc::clone(&context)))
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    let kv = KvServer::new(KvService(context));
    loop {
        let (stream, _) = listener.accept().await?;
        let (peer, kv) = (peer.clone(), kv.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let (mut peer, mut kv) = (peer.clone(), kv.clone());
            async move {
                if request.uri().path().starts_with("/etcdserverpb.KV/") {
                    kv.call(request).await
                } else {
                    peer.call(request).await
                }
            }
        });
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(Some(PING_INTERVAL))
            .keep_alive_timeout(ELECTION)
            // Of the operating system's clock.
            .auto_date_header(false)
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(async move {
            // Connections break: that is what is tried here.
            let _ = connection.await;
        });
    }
}
