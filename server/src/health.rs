//! health (the rpc helper's).
