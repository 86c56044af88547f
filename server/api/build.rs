//! Compiles the .proto files without protoc.

use std::path::{Path, PathBuf};

const FILES: [&str; 13] = [
    "proto/auth.proto",
    "proto/authpb.proto",
    "proto/cluster.proto",
    "proto/header.proto",
    "proto/kv.proto",
    "proto/lease.proto",
    "proto/leasepb.proto",
    "proto/maintenance.proto",
    "proto/membership.proto",
    "proto/mvcc.proto",
    "proto/peer.proto",
    "proto/raft_internal.proto",
    "proto/watch.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let set = protox::compile(FILES, ["proto"])?;
    let grpc = std::env::var_os("CARGO_FEATURE_GRPC").is_some();
    let out: PathBuf = std::env::var("OUT_DIR")?.into();
    tonic_prost_build::configure()
        .build_client(grpc)
        .build_server(grpc)
        // Values travel from the frame to the log and the cache without a copy.
        .bytes(".")
        .file_descriptor_set_path(out.join("descriptor.bin"))
        .compile_fds(set)?;
    if grpc {
        for services in ["etcdserverpb.rs", "ballastpeerpb.rs"] {
            use_own_codec(&out.join(services))?;
        }
    }
    Ok(())
}

/// The builder of services built from a descriptor set cannot be told of another codec.
fn use_own_codec(file: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let generated = std::fs::read_to_string(file)?;
    let ours = generated.replace(
        "tonic_prost::ProstCodec::default()",
        "crate::codec::Codec::default()",
    );
    if ours == generated {
        return Err("no service names its codec any more".into());
    }
    Ok(std::fs::write(file, ours)?)
}
