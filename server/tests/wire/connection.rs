//! Flags about connections, seen by a client that speaks HTTP/2 by hand: no library lets its user do what these ask for.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::harness::Server;

const DATA: u8 = 0;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;
const MAX_CONCURRENT_STREAMS: u16 = 3;
const ENHANCE_YOUR_CALM: u32 = 0xb;

/// Longer than the server takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

struct Frame {
    kind: u8,
    flags: u8,
    payload: Vec<u8>,
}

/// A client's side of a connection, after the preface.
struct Connection(TcpStream);

impl Connection {
    fn open(server: &Server) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut connection = Self(stream);
        connection
            .0
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .unwrap();
        connection.send(SETTINGS, 0, &[]);
        connection
    }

    fn send(&mut self, kind: u8, flags: u8, payload: &[u8]) {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags, 0, 0, 0, 0]);
        frame.extend(payload);
        self.0.write_all(&frame).unwrap();
    }

    /// The next frame; None at the connection's end.
    fn receive(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        match self.0.read_exact(&mut head) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                panic!("nothing came for {PATIENCE:?}")
            }
            Err(_) => return None,
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        self.0.read_exact(&mut payload).unwrap();
        Some(Frame {
            kind: head[3],
            flags: head[4],
            payload,
        })
    }

    /// The first frame that `wanted` accepts; None when the connection ends before.
    fn find(&mut self, wanted: impl Fn(&Frame) -> bool) -> Option<Frame> {
        loop {
            let frame = self.receive()?;
            if wanted(&frame) {
                return Some(frame);
            }
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// `--max-concurrent-streams`.
#[test]
fn a_client_is_told_how_many_streams_it_may_open() {
    for (args, expected) in [(&[][..], u32::MAX), (&["--max-concurrent-streams", "3"], 3)] {
        let server = Server::start_with(args);
        let mut connection = Connection::open(&server);
        let settings = connection
            .find(|frame| frame.kind == SETTINGS && frame.flags & ACK == 0)
            .unwrap();
        let told = settings
            .payload
            .chunks(6)
            .find(|setting| setting[..2] == MAX_CONCURRENT_STREAMS.to_be_bytes())
            .map(|setting| u32_at(setting, 2));
        assert_eq!(told.unwrap_or(u32::MAX), expected, "{args:?}");
    }
}

/// `--grpc-keepalive-min-time`; without a call open, two hours are the least whatever the flag says.
#[test]
fn a_flood_of_pings_is_ended_with_enhance_your_calm() {
    let server = Server::start();
    let mut connection = Connection::open(&server);
    for _ in 0..4 {
        connection.send(PING, 0, &[1; 8]);
    }
    let last = connection.find(|frame| frame.kind == GOAWAY).unwrap();
    assert_eq!(u32_at(&last.payload, 0), 0, "no stream was opened");
    assert_eq!(u32_at(&last.payload, 4), ENHANCE_YOUR_CALM);
    assert_eq!(&last.payload[8..], b"too_many_pings");
    assert!(
        connection.find(|frame| frame.kind == DATA).is_none(),
        "and it ends"
    );
    // A client of its own is not disturbed.
    let mut other = Connection::open(&server);
    other.send(PING, 0, &[2; 8]);
    let answer = other
        .find(|frame| frame.kind == PING && frame.flags & ACK != 0)
        .unwrap();
    assert_eq!(answer.payload, [2; 8]);
}

/// The flag itself: with a call open, pings may come as often as it says and not more often.
#[test]
fn with_a_call_open_the_flag_says_how_often_a_client_may_ping() {
    // A watch that is opened and told nothing: HEADERS of a request, every field a literal.
    let field = |name: &str, value: &str| {
        let mut field = vec![0, name.len() as u8];
        field.extend(name.bytes());
        field.push(value.len() as u8);
        field.extend(value.bytes());
        field
    };
    let headers = [
        field(":method", "POST"),
        field(":scheme", "http"),
        field(":path", "/etcdserverpb.Watch/Watch"),
        field(":authority", "localhost"),
        field("content-type", "application/grpc"),
        field("te", "trailers"),
    ]
    .concat();
    for (min_time, calm) in [("1h", false), ("1ns", true)] {
        let server = Server::start_with(&["--grpc-keepalive-min-time", min_time]);
        let mut connection = Connection::open(&server);
        let mut request = (headers.len() as u32).to_be_bytes()[1..].to_vec();
        request.extend([1, 4, 0, 0, 0, 1]);
        request.extend(&headers);
        connection.0.write_all(&request).unwrap();
        // The answer's HEADERS forgive the first ping, two more are borne, the fourth is one too many.
        connection.find(|frame| frame.kind == 1).unwrap();
        for i in 0..8 {
            let mark = [i; 8];
            if connection
                .0
                .write_all(&[&[0, 0, 8, PING, 0, 0, 0, 0, 0][..], &mark].concat())
                .is_err()
            {
                break;
            }
        }
        let last = connection
            .find(|frame| frame.kind == GOAWAY || (frame.kind == PING && frame.payload == [7; 8]))
            .unwrap();
        assert_eq!(last.kind == PING, calm, "{min_time}");
    }
}

/// `--grpc-keepalive-interval` and `--grpc-keepalive-timeout`.
#[test]
fn a_client_that_answers_no_ping_is_left() {
    let flags = [
        "--grpc-keepalive-interval=1s",
        "--grpc-keepalive-timeout=1s",
    ];
    let server = Server::start_with(&flags);
    let mut silent = Connection::open(&server);
    assert!(
        silent
            .find(|frame| frame.kind == PING && frame.flags & ACK == 0)
            .is_some()
    );
    assert!(silent.find(|frame| frame.kind == DATA).is_none(), "it ends");
    let mut polite = Connection::open(&server);
    for _ in 0..3 {
        let ping = polite
            .find(|frame| frame.kind == PING && frame.flags & ACK == 0)
            .unwrap();
        polite.send(PING, ACK, &ping.payload);
    }
}
