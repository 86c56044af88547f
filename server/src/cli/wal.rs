//! `ballast wal dump DIR`: the log as lines of JSON, for tools that judge histories.
//!
//! One line an entry in log order: `{"index", "term", "type", "request"}`; the request is etcd's `InternalRaftRequest` in
//! base64, empty for entries without one. Works on a data directory, its `member/wal`, or a copy of either taken live.
//!
//! etcd: tools/etcd-dump-logs.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ballast_storage::StorageError;
use ballast_storage::wal::{WalEntry, dump};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::raft::command::{KIND_BLANK, KIND_MEMBERSHIP, KIND_REQUEST};

const USAGE: &str = "Usage: ballast wal dump DIR

  Prints the log in DIR (a data directory, its member/wal, a --wal-dir, or a copy of one) as
  one line of JSON an entry, in log order:

    {\"index\":7,\"term\":2,\"type\":\"request\",\"request\":\"...\"}

  type     request, blank (a new leader's first entry) or membership
  request  etcd's InternalRaftRequest in base64; empty for the other types

  Entries that a later leader overwrote are left out. Purged ones are there while their segment is
  (--max-wals=0 keeps all). The directory may be a copy of one in use, taken in any order: what was
  not yet complete when it was copied ends the output. Nothing is locked or written.

  Exit code: 0 done, 1 the log cannot be read, 2 wrong usage.
";

/// Runs `ballast wal ARGS`.
pub(super) fn run(args: &[String]) -> ExitCode {
    match args {
        [command, dir] if command == "dump" => match dump_to(Path::new(dir), std::io::stdout()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                super::complain(&error.to_string());
                ExitCode::FAILURE
            }
        },
        [flag] if flag == "-h" || flag == "--help" => {
            super::print(USAGE);
            ExitCode::SUCCESS
        }
        _ => {
            super::complain(USAGE);
            ExitCode::from(2)
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum DumpError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("write the dump: {0}")]
    Output(#[from] std::io::Error),
}

fn dump_to(dir: &Path, out: impl Write) -> Result<(), DumpError> {
    let inner: PathBuf = dir.join("member").join("wal");
    let dir = if inner.is_dir() { &inner } else { dir };
    let mut out = BufWriter::new(out);
    dump::entries::<DumpError>(dir, &mut |entry| Ok(writeln!(out, "{}", line(&entry))?))?;
    Ok(out.flush()?)
}

fn line(entry: &WalEntry) -> String {
    let kind = match entry.kind {
        KIND_BLANK => "blank",
        KIND_REQUEST => "request",
        KIND_MEMBERSHIP => "membership",
        _ => "unknown",
    };
    let request = if entry.kind == KIND_REQUEST {
        STANDARD.encode(&entry.payload)
    } else {
        String::new()
    };
    format!(
        r#"{{"index":{},"term":{},"type":"{kind}","request":"{request}"}}"#,
        entry.position.index, entry.position.term
    )
}
