//! The kernel's side of the file system: requests read from /dev/fuse, answered from a [`Tree`]. The protocol is the kernel's own
//! (`include/uapi/linux/fuse.h`, version 7.31), of which little is needed.
//!
//! What would make it lie, and is avoided: a sync left unimplemented counts as done for the kernel; a cached name or attribute would outlive
//! a cut (nothing is cached, and numbers change at a cut); a write with O_DSYNC is a write and a sync; `direct_io` would break mmap.

use std::ffi::{CString, OsStr};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use super::content::SECTOR;
use super::tree::{Ino, Tree};
use super::{SOURCE, State};

const VERSION: (u32, u32) = (7, 31);
const ASYNC_READ: u32 = 1 << 0;
const BIG_WRITES: u32 = 1 << 5;
const MAX_PAGES: u32 = 1 << 22;
const WRITE_BYTES_MAX: u32 = 1 << 20;
const WRITE_PAGES_MAX: u16 = 256;
/// Of a request without the bytes to write.
const HEAD_BYTES: usize = 4096;
const IN_HEADER_BYTES: usize = 40;
const OUT_HEADER_BYTES: u32 = 16;

const NAME_BYTES_MAX: u32 = 255;
const BLOCK_BYTES: u32 = 4096;
const DIRECTORY_MODE: u32 = 0o040_000;
const FILE_MODE: u32 = 0o100_000;
const FALLOC_KEEP_SIZE: u32 = 1;
const FALLOC_PUNCH_HOLE: u32 = 2;
const RENAME_NOREPLACE: u32 = 1;
/// What a setattr is about.
const SET_MODE: u32 = 1 << 0;
const SET_UID: u32 = 1 << 1;
const SET_GID: u32 = 1 << 2;
const SET_SIZE: u32 = 1 << 3;
const NOTIFY_INVAL_INODE: i32 = 2;

/// A mounted file system.
#[derive(Debug)]
pub(super) struct Device {
    file: File,
}

/// What the kernel hears.
enum Reply {
    Now(Result<Vec<u8>, Errno>),
    /// Somebody else will answer.
    Later,
    /// There is none to this kind of request.
    Never,
}

/// Reads a request's fields, all little-endian on the machines we test on.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(*bytes)
    }

    fn u32(&mut self) -> Result<u32, Errno> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Errno> {
        self.take().map(u64::from_le_bytes)
    }

    fn name(&mut self) -> Result<&'a OsStr, Errno> {
        let end = self.0.iter().position(|&byte| byte == 0);
        let (name, rest) = self.0.split_at(end.ok_or(Errno::INVAL)?);
        self.0 = &rest[1..];
        Ok(OsStr::from_bytes(name))
    }
}

/// One request.
struct Request<'a> {
    opcode: u32,
    unique: u64,
    node: Ino,
    owner: (u32, u32),
    body: Fields<'a>,
}

impl<'a> Request<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, Errno> {
        let (header, body) = bytes
            .split_at_checked(IN_HEADER_BYTES)
            .ok_or(Errno::INVAL)?;
        let mut header = Fields(header);
        header.u32()?;
        Ok(Self {
            opcode: header.u32()?,
            unique: header.u64()?,
            node: header.u64()?,
            owner: (header.u32()?, header.u32()?),
            body: Fields(body),
        })
    }
}

impl Device {
    /// Mounts on a folder. Requests wait until [`serve`](Self::serve) runs.
    pub(super) fn mount(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let file = file.context("open /dev/fuse")?;
        let data = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions",
            file.as_raw_fd()
        );
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        let data = CString::new(data)?;
        mount(SOURCE, path, "fuse", flags, data.as_c_str())
            .with_context(|| format!("mount on {}: this needs root", path.display()))?;
        Ok(Self { file })
    }

    /// Answers until it is unmounted.
    pub(super) fn serve(self: &Arc<Self>, state: &Arc<State>) -> Result<()> {
        let mut buffer = vec![0; WRITE_BYTES_MAX as usize + HEAD_BYTES];
        loop {
            let count = match (&self.file).read(&mut buffer) {
                Ok(count) => count,
                // Given up by whoever asked.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {
                    return Ok(());
                }
                Err(error) => return Err(error).context("read /dev/fuse"),
            };
            let Ok(request) = Request::parse(&buffer[..count]) else {
                continue;
            };
            let unique = request.unique;
            match self.answer(state, request) {
                Reply::Now(answer) => self.reply(unique, answer),
                Reply::Later | Reply::Never => {}
            }
        }
    }

    fn reply(&self, unique: u64, answer: Result<Vec<u8>, Errno>) {
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(errno) => (-errno.raw_os_error(), Vec::new()),
        };
        self.send(unique, error, &body);
    }

    fn send(&self, unique: u64, error: i32, body: &[u8]) {
        let mut out = Out::default();
        out.u32(OUT_HEADER_BYTES + body.len() as u32);
        out.u32(error.cast_unsigned()).u64(unique).bytes(body);
        // Of a request that was given up meanwhile, or of an inode that the kernel never saw.
        drop((&self.file).write_all(&out.0));
    }

    /// Makes the kernel forget what it has of a file.
    pub(super) fn invalidate(&self, ino: Ino) {
        let mut body = Out::default();
        body.u64(ino).u64(0).u64(0);
        self.send(0, NOTIFY_INVAL_INODE, &body.0);
    }

    /// Syncs a file as the present faults have it, then replies: with a slow disk, later and elsewhere.
    fn sync(self: &Arc<Self>, state: &Arc<State>, request: &Request<'_>, body: Vec<u8>) -> Reply {
        let (ino, unique) = (request.node, request.unique);
        let slow = state.slow_sync();
        if slow.is_zero() {
            return Reply::Now(state.sync(ino).map(|()| body));
        }
        let (device, state) = (Arc::clone(self), Arc::clone(state));
        std::thread::spawn(move || {
            std::thread::sleep(slow);
            device.reply(unique, state.sync(ino).map(|()| body));
        });
        Reply::Later
    }

    fn answer(self: &Arc<Self>, state: &Arc<State>, mut request: Request<'_>) -> Reply {
        let node = request.node;
        let done = |()| Vec::new();
        let answer = match request.opcode {
            op::FORGET | op::INTERRUPT | op::BATCH_FORGET => return Reply::Never,
            op::FSYNC => return self.sync(state, &request, Vec::new()),
            op::WRITE => {
                let written = self.write(state, &mut request);
                return written.unwrap_or_else(|errno| Reply::Now(Err(errno)));
            }
            op::INIT => Ok(init()),
            op::RELEASE => {
                // Of a killed program too, whose files close while the power is off.
                state.closed(node);
                Ok(Vec::new())
            }
            op::RELEASEDIR | op::DESTROY => Ok(Vec::new()),
            op::FSYNCDIR => state.sync_dir(node).map(done),
            _ => state.on(|tree| on_tree(tree, &mut request)),
        };
        Reply::Now(answer)
    }

    fn write(
        self: &Arc<Self>,
        state: &Arc<State>,
        request: &mut Request<'_>,
    ) -> Result<Reply, Errno> {
        let body = &mut request.body;
        let (_, offset, size) = (body.u64()?, body.u64()?, body.u32()?);
        let (_, _, flags, _) = (body.u32()?, body.u64()?, body.u32()?, body.u32()?);
        let data = body.0.get(..size as usize).ok_or(Errno::INVAL)?;
        state.count_write();
        state.on(|tree| tree.write(request.node, offset, data))?;
        let mut out = Out::default();
        out.u32(size).u32(0);
        if OFlags::from_bits_retain(flags).contains(OFlags::DSYNC) {
            return Ok(self.sync(state, request, out.0));
        }
        Ok(Reply::Now(Ok(out.0)))
    }
}

/// Kinds of requests.
mod op {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const MKDIR: u32 = 9;
    pub(super) const UNLINK: u32 = 10;
    pub(super) const RMDIR: u32 = 11;
    pub(super) const RENAME: u32 = 12;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const FSYNCDIR: u32 = 30;
    pub(super) const CREATE: u32 = 35;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
    pub(super) const RENAME2: u32 = 45;
}

/// Writes an answer's fields.
#[derive(Default)]
struct Out(Vec<u8>);

impl Out {
    fn u16(&mut self, number: u16) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    fn u32(&mut self, number: u32) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    fn u64(&mut self, number: u64) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Size, blocks, mode and owner; all times are zero.
    fn attributes(&mut self, tree: &Tree, ino: Ino) -> Result<&mut Self, Errno> {
        let node = tree.node(ino)?;
        let block = u64::from(BLOCK_BYTES);
        let (kind, size, allocated) = match &node.file {
            Some(file) => (FILE_MODE, file.live.len, file.live.allocated()),
            None => (DIRECTORY_MODE, block, block),
        };
        self.u64(ino).u64(size).u64(allocated / SECTOR as u64);
        self.u64(0).u64(0).u64(0).u32(0).u32(0).u32(0);
        self.u32(kind | node.mode).u32(1);
        self.u32(node.owner.0).u32(node.owner.1);
        Ok(self.u32(0).u32(BLOCK_BYTES).u32(0))
    }

    /// A name's inode. The kernel is to remember neither name nor attributes.
    fn entry(&mut self, tree: &Tree, ino: Ino) -> Result<&mut Self, Errno> {
        self.u64(ino).u64(0).u64(0).u64(0).u32(0).u32(0);
        self.attributes(tree, ino)
    }

    /// An open file; nothing special about it.
    fn opened(&mut self) -> &mut Self {
        self.u64(0).u32(0).u32(0)
    }
}

fn init() -> Vec<u8> {
    let mut out = Out::default();
    out.u32(VERSION.0).u32(VERSION.1).u32(1 << 17);
    out.u32(ASYNC_READ | BIG_WRITES | MAX_PAGES);
    out.u16(16).u16(12).u32(WRITE_BYTES_MAX).u32(1);
    out.u16(WRITE_PAGES_MAX).u16(0).u32(0);
    out.bytes(&[0; 28]);
    out.0
}

/// Requests that need nothing but the tree.
fn on_tree(tree: &mut Tree, request: &mut Request<'_>) -> Result<Vec<u8>, Errno> {
    let (node, owner, body) = (request.node, request.owner, &mut request.body);
    let mut out = Out::default();
    match request.opcode {
        op::LOOKUP => {
            let ino = tree.lookup(node, body.name()?)?;
            out.entry(tree, ino)?;
        }
        op::GETATTR => {
            out.u64(0).u64(0).attributes(tree, node)?;
        }
        op::SETATTR => {
            set_attributes(tree, node, body)?;
            out.u64(0).u64(0).attributes(tree, node)?;
        }
        op::MKDIR => {
            let (mode, umask) = (body.u32()?, body.u32()?);
            let ino = tree.make(node, body.name()?, mode & !umask, owner, true)?;
            out.entry(tree, ino)?;
        }
        op::CREATE => {
            let (_, mode, umask, _) = (body.u32()?, body.u32()?, body.u32()?, body.u32()?);
            let ino = tree.make(node, body.name()?, mode & !umask, owner, false)?;
            tree.opened(ino)?;
            out.entry(tree, ino)?.opened();
        }
        op::UNLINK => tree.remove(node, body.name()?, false)?,
        op::RMDIR => tree.remove(node, body.name()?, true)?,
        op::RENAME | op::RENAME2 => {
            let to = body.u64()?;
            let flags = match request.opcode {
                op::RENAME2 => (body.u32()?, body.u32()?).0,
                _ => 0,
            };
            if flags & !RENAME_NOREPLACE != 0 {
                return Err(Errno::INVAL);
            }
            let (from, name) = (body.name()?, body.name()?);
            tree.rename((node, from), (to, name), flags == 0)?;
        }
        op::OPEN => {
            tree.opened(node)?;
            out.opened();
        }
        op::OPENDIR => {
            out.opened();
        }
        op::FLUSH => {}
        op::READ => {
            let (_, offset, size) = (body.u64()?, body.u64()?, body.u32()?);
            let bytes = tree.file(node)?.live.read(offset, size as usize);
            return Ok(bytes);
        }
        op::READDIR => {
            let (_, offset, size) = (body.u64()?, body.u64()?, body.u32()?);
            return list(tree, node, offset as usize, size as usize);
        }
        op::STATFS => {
            let blocks = tree.capacity.min(1 << 44) / u64::from(BLOCK_BYTES);
            let used = tree.used().div_ceil(u64::from(BLOCK_BYTES));
            let free = blocks.saturating_sub(used);
            out.u64(blocks)
                .u64(free)
                .u64(free)
                .u64(1 << 20)
                .u64(1 << 20);
            out.u32(BLOCK_BYTES).u32(NAME_BYTES_MAX).u32(BLOCK_BYTES);
            out.bytes(&[0; 28]);
        }
        op::FALLOCATE => {
            let (_, offset, length) = (body.u64()?, body.u64()?, body.u64()?);
            allocate(tree, node, offset, length, body.u32()?)?;
        }
        _ => return Err(Errno::NOSYS),
    }
    Ok(out.0)
}

fn set_attributes(tree: &mut Tree, ino: Ino, body: &mut Fields<'_>) -> Result<(), Errno> {
    let (valid, _, _, size) = (body.u32()?, body.u32()?, body.u64()?, body.u64()?);
    // The lock's owner, the times.
    body.take::<{ 4 * 8 + 3 * 4 }>()?;
    let (mode, _, uid, gid) = (body.u32()?, body.u32()?, body.u32()?, body.u32()?);
    let node = tree.node_mut(ino)?;
    if valid & SET_MODE != 0 {
        node.mode = mode & 0o7777;
    }
    if valid & SET_UID != 0 {
        node.owner.0 = uid;
    }
    if valid & SET_GID != 0 {
        node.owner.1 = gid;
    }
    if valid & SET_SIZE != 0 {
        tree.set_len(ino, size)?;
    }
    Ok(())
}

fn allocate(tree: &mut Tree, ino: Ino, offset: u64, length: u64, mode: u32) -> Result<(), Errno> {
    match mode {
        0 => tree.reserve(ino, offset + length, false),
        FALLOC_KEEP_SIZE => tree.reserve(ino, offset + length, true),
        // A hole's blocks are not given back: they only read as zeros.
        mode if mode == FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE => {
            let end = tree.file(ino)?.live.len.min(offset + length);
            let zeros = vec![0; end.saturating_sub(offset) as usize];
            tree.write(ino, offset, &zeros)
        }
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// Entries from number `offset` on, as many as fit.
fn list(tree: &Tree, dir: Ino, offset: usize, size: usize) -> Result<Vec<u8>, Errno> {
    let dots = [(OsStr::new("."), dir), (OsStr::new(".."), dir)];
    let entries = tree.entries(dir)?.iter();
    let entries = entries.map(|(name, &ino)| (name.as_os_str(), ino));
    let all = dots.into_iter().chain(entries).enumerate();
    let mut out = Out::default();
    for (number, (name, ino)) in all.skip(offset) {
        let kind = match tree.node(ino)?.file {
            Some(_) => FILE_MODE >> 12,
            None => DIRECTORY_MODE >> 12,
        };
        let mut entry = Out::default();
        entry.u64(ino).u64(number as u64 + 1);
        entry
            .u32(name.len() as u32)
            .u32(kind)
            .bytes(name.as_bytes());
        entry.0.resize(entry.0.len().next_multiple_of(8), 0);
        if out.0.len() + entry.0.len() > size {
            break;
        }
        out.bytes(&entry.0);
    }
    Ok(out.0)
}
