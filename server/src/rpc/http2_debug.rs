//! `GODEBUG=http2debug=2`: the authority of each call, in the line in which Go's HTTP/2 tells it. etcd's own tests see by it what clients send.
//!
//! Promises: without the variable nothing is done. Not here: other headers, and what the log says of calls (`call.rs`).
//!
//! etcd: golang.org/x/net/http2, which it is built with.

use std::io::Write as _;
use std::sync::LazyLock;

use http::Uri;

static ASKED: LazyLock<bool> =
    LazyLock::new(|| std::env::var("GODEBUG").is_ok_and(|value| asks(&value)));

fn asks(value: &str) -> bool {
    value.split(',').any(|part| part == "http2debug=2")
}

/// Tells of a call, if asked to.
pub(super) fn tell(uri: &Uri) {
    if !*ASKED {
        return;
    }
    if let Some(authority) = uri.authority() {
        // A line of its own form, so not one of the log's; nobody to tell when it cannot be written.
        let _ = writeln!(
            std::io::stderr().lock(),
            "http2: decoded hpack field header field \":authority\" = {:?}",
            authority.as_str()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_one_of_the_parts_of_the_variable() {
        assert!(asks("http2debug=2"));
        assert!(asks("gctrace=1,http2debug=2"));
        for value in ["", "http2debug=1", "http2debug=22"] {
            assert!(!asks(value), "{value}");
        }
    }
}
