//! Streams over a real store, without a network: requests in, response bytes out, decoded by the ordinary decoder.

mod basics;
mod harness;
mod random;
