//! Recognises a real etcd's data directory, so that it is refused and not written into.
//!
//! etcd: server/storage/wal (framing), bbolt (meta pages).

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::StorageError;

/// What to do with one, for the refusal.
const ADVICE: &str = "this is the data directory of an etcd; ballast does not open it. Take a snapshot of that etcd with \
                      `etcdctl snapshot save FILE` and make a new directory from it with \
                      `ballast snapshot restore FILE --data-dir DIR`";

/// Refuses a data directory (the one that has `member/` in it) in which an etcd left a log or a database.
pub fn check_data_dir(data_dir: &Path) -> Result<(), StorageError> {
    let member = data_dir.join("member");
    if is_bolt(&member.join("snap").join("db")) {
        return refuse(data_dir);
    }
    check_wal_dir(&member.join("wal"))
}

/// Refuses a log directory that holds an etcd's segments.
pub(crate) fn check_wal_dir(dir: &Path) -> Result<(), StorageError> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Ok(());
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|ext| ext == "wal") && is_etcd_wal(&path) {
            return refuse(dir);
        }
    }
    Ok(())
}

fn refuse(path: &Path) -> Result<(), StorageError> {
    Err(StorageError::Refused {
        path: path.to_owned(),
        why: ADVICE.to_owned(),
    })
}

fn head<const N: usize>(path: &Path) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    File::open(path).ok()?.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

/// An etcd segment begins with a frame (a little-endian length whose top byte says how much padding follows) around a
/// protobuf record whose first field is its type, 4 for a checksum.
fn is_etcd_wal(path: &Path) -> bool {
    head::<10>(path).is_some_and(|b| b[0] < 32 && b[1..7] == [0; 6] && b[8..10] == [0x08, 0x04])
}

/// bbolt's first page is a meta page: 16 bytes of page header, then the magic number.
fn is_bolt(path: &Path) -> bool {
    head::<20>(path).is_some_and(|b| b[16..20] == 0xED0C_DAED_u32.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_etcd_log_and_an_etcd_database_are_refused_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        check_data_dir(dir.path()).unwrap();

        let wal = dir.path().join("member/wal");
        std::fs::create_dir_all(&wal).unwrap();
        let first = [
            0x04, 0, 0, 0, 0, 0, 0, 0x84, 0x08, 0x04, 0x10, 0x00, 0, 0, 0, 0,
        ];
        std::fs::write(wal.join("0000000000000000-0000000000000000.wal"), first).unwrap();
        let refusal = check_data_dir(dir.path()).unwrap_err().to_string();
        assert!(refusal.contains("ballast snapshot restore"), "{refusal}");
        std::fs::remove_dir_all(&wal).unwrap();

        let snap = dir.path().join("member/snap");
        std::fs::create_dir_all(&snap).unwrap();
        let mut page = vec![0; 4096];
        page[16..20].copy_from_slice(&[0xED, 0xDA, 0x0C, 0xED]);
        std::fs::write(snap.join("db"), page).unwrap();
        assert!(matches!(
            check_data_dir(dir.path()),
            Err(StorageError::Refused { .. })
        ));
    }
}
