//! Container images made without an engine: a from-scratch image is one layer of files, written as
//! an OCI layout in a tar file that `ctr images import` reads.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::json;
use sha2::{Digest as _, Sha256};

/// An image to write.
pub struct Image {
    /// The full reference pods use, such as `ballast.dev/e2e/web:1`.
    pub reference: String,
    pub entrypoint: Vec<String>,
    /// The user and group it runs as, such as `65532:65532`.
    pub user: String,
    files: BTreeMap<PathBuf, PathBuf>,
}

impl Image {
    /// An image that runs one program, with the shared libraries the program needs. A static
    /// program brings none.
    pub fn of_program(reference: &str, program: &Path, entrypoint: &[&str]) -> Result<Self> {
        let name = program.file_name().context("a program has a file name")?;
        let inside = Path::new("/usr/local/bin").join(name);
        let mut files = BTreeMap::new();
        for library in shared_libraries(program)? {
            let source = library
                .canonicalize()
                .with_context(|| library.display().to_string())?;
            files.insert(library, source);
        }
        let source = program
            .canonicalize()
            .with_context(|| program.display().to_string())?;
        files.insert(inside.clone(), source);
        let mut entry = vec![inside.to_string_lossy().into_owned()];
        entry.extend(entrypoint.iter().map(|&argument| argument.to_owned()));
        Ok(Self {
            reference: reference.to_owned(),
            entrypoint: entry,
            user: "65532:65532".to_owned(),
            files,
        })
    }

    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        user.clone_into(&mut self.user);
        self
    }

    /// Writes the image. The same files give the same bytes.
    pub fn write(&self, path: &Path) -> Result<()> {
        let layer = self.layer().context("the image's files")?;
        let config = serde_json::to_vec(&json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "User": self.user,
                "Env": ["PATH=/usr/local/bin"],
                "WorkingDir": "/",
            },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)] },
        }))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        }))?;
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["annotations"] = json!({ "io.containerd.image.name": self.reference });
        entry["platform"] = json!({ "architecture": architecture(), "os": "linux" });
        let index = serde_json::to_vec(&json!({ "schemaVersion": 2, "manifests": [entry] }))?;

        let partial = path.with_extension("partial");
        let mut archive = tar::Builder::new(fs::File::create(&partial)?);
        append(
            &mut archive,
            "oci-layout",
            br#"{"imageLayoutVersion":"1.0.0"}"#,
            0o644,
        )?;
        append(&mut archive, "index.json", &index, 0o644)?;
        for blob in [&layer, &config, &manifest] {
            append(
                &mut archive,
                &digest(blob).replace("sha256:", "blobs/sha256/"),
                blob,
                0o644,
            )?;
        }
        archive.into_inner()?.flush()?;
        fs::rename(&partial, path).with_context(|| path.display().to_string())
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut archive = tar::Builder::new(Vec::new());
        let mut folders = BTreeSet::from([PathBuf::from("/tmp")]);
        for inside in self.files.keys() {
            folders.extend(inside.ancestors().skip(1).map(Path::to_path_buf));
        }
        for folder in folders.iter().filter(|folder| folder.parent().is_some()) {
            let mode = if folder == Path::new("/tmp") {
                0o1777
            } else {
                0o755
            };
            let mut header = header(0, mode);
            header.set_entry_type(tar::EntryType::Directory);
            archive.append_data(&mut header, folder.strip_prefix("/")?, std::io::empty())?;
        }
        for (inside, source) in &self.files {
            let bytes = fs::read(source).with_context(|| source.display().to_string())?;
            append(
                &mut archive,
                &inside.strip_prefix("/")?.to_string_lossy(),
                &bytes,
                0o755,
            )?;
        }
        Ok(archive.into_inner()?)
    }
}

/// The shared libraries a program is linked to, its loader among them.
fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        if text.contains("not a dynamic executable") || errors.contains("not a dynamic executable")
        {
            return Ok(Vec::new());
        }
        bail!("ldd {}: {errors}", program.display());
    }
    // A line is `name => /path (address)`, `/path (address)` or, for the kernel's own, no path.
    let path = |line: &str| {
        let target = line
            .split_once("=>")
            .map_or(line, |(_, target)| target)
            .trim();
        target
            .starts_with('/')
            .then(|| target.split(' ').next().unwrap_or(target).into())
    };
    Ok(text.lines().filter_map(path).collect())
}

fn append(
    archive: &mut tar::Builder<impl std::io::Write>,
    path: &str,
    bytes: &[u8],
    mode: u32,
) -> Result<()> {
    Ok(archive.append_data(&mut header(bytes.len(), mode), path, bytes)?)
}

fn header(size: usize, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_size(size as u64);
    header.set_mode(mode);
    header.set_mtime(0);
    header
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

fn descriptor(media_type: &str, bytes: &[u8]) -> serde_json::Value {
    json!({ "mediaType": media_type, "digest": digest(bytes), "size": bytes.len() })
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_brings_the_libraries_its_program_needs_and_is_the_same_every_time() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let image = Image::of_program("example.org/env:1", Path::new("/usr/bin/env"), &[])
            .expect("env can be read");
        assert!(
            image
                .files
                .keys()
                .any(|path| path.to_string_lossy().contains("libc.so"))
        );
        let (one, two) = (folder.path().join("one.tar"), folder.path().join("two.tar"));
        image.write(&one).expect("the image can be written");
        image.write(&two).expect("the image can be written");
        assert_eq!(
            fs::read(&one).expect("it is there"),
            fs::read(&two).expect("it is there")
        );
    }
}
