//! The Go programs the harness uses, built from the modules in `e2e/go/` and kept in the cache.
//!
//! A build lands in `<cache>/tools/<module>-<hash>/`, where the hash covers the module's files, the
//! compiler's version and the flags, so a build happens once per change. `<cache>/bin/` holds a
//! link to each program's newest build.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::paths;
use crate::progress::Progress;

/// The release of Kubernetes that the module `kubernetes` builds.
pub const KUBERNETES_VERSION: &str = "v1.36.3";
/// The release of CoreDNS that the module `coredns` builds.
pub const COREDNS_VERSION: &str = "v1.14.7";

/// One Go module below `e2e/go/` and the programs it yields.
pub struct Module {
    pub name: &'static str,
    programs: &'static [Program],
}

struct Program {
    name: &'static str,
    package: &'static str,
    ldflags: &'static [&'static str],
    /// Further names of the same binary.
    links: &'static [&'static str],
}

const fn program(name: &'static str, package: &'static str) -> Program {
    Program {
        name,
        package,
        ldflags: &[],
        links: &[],
    }
}

/// All modules, in the order in which they are built: what others wait for comes first.
pub const MODULES: [Module; 8] = [
    Module {
        name: "pods",
        programs: &[program("pods", ".")],
    },
    Module {
        name: "etcd",
        programs: &[
            program("etcd", "go.etcd.io/etcd/server/v3"),
            program("etcdctl", "go.etcd.io/etcd/etcdctl/v3"),
            program("etcdutl", "go.etcd.io/etcd/etcdutl/v3"),
        ],
    },
    Module {
        name: "kubernetes",
        programs: &[Program {
            name: "kubernetes",
            package: ".",
            // Unstamped, the API server and the kubelet call themselves v0.0.0 and refuse each other.
            ldflags: &[
                "-X k8s.io/component-base/version.gitVersion=v1.36.3",
                "-X k8s.io/component-base/version.gitMajor=1",
                "-X k8s.io/component-base/version.gitMinor=36",
            ],
            links: &[
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
            ],
        }],
    },
    Module {
        name: "coredns",
        programs: &[program("coredns", ".")],
    },
    Module {
        name: "helm",
        programs: &[program("helm", "helm.sh/helm/v4/cmd/helm")],
    },
    Module {
        name: "boltcheck",
        programs: &[program("boltcheck", ".")],
    },
    Module {
        name: "linearize",
        programs: &[program("linearize", ".")],
    },
    Module {
        name: "benchmark",
        programs: &[program("benchmark", "go.etcd.io/etcd/v3/tools/benchmark")],
    },
];

/// The path of a program, which [`ensure`] has built before.
pub fn path(program: &str) -> Result<PathBuf> {
    let path = paths::cache()?.join("bin").join(program);
    if !path.exists() {
        bail!("{} is not built: run `ballast-e2e tools`", path.display());
    }
    Ok(path)
}

/// Builds the named modules where no build of their present form is cached.
pub fn ensure(names: &[&str], progress: &Progress) -> Result<()> {
    for module in MODULES.iter().filter(|module| names.contains(&module.name)) {
        module
            .ensure(progress)
            .with_context(|| format!("building e2e/go/{}", module.name))?;
    }
    Ok(())
}

impl Module {
    fn ensure(&self, progress: &Progress) -> Result<()> {
        let sources = paths::repository().join("e2e/go").join(self.name);
        let cache = paths::cache()?;
        fs::create_dir_all(&cache)?;
        let folder = cache
            .join("tools")
            .join(format!("{}-{}", self.name, self.hash(&sources)?));
        if folder.is_dir() {
            progress.detail(&format!("{}: cached", self.name));
        } else {
            progress.detail(&format!("{}: building", self.name));
            // Two runs that want the same wait for one build, not for two.
            let lock = fs::File::create(cache.join(format!("{}.lock", self.name)))?;
            lock.lock()?;
            if !folder.is_dir() {
                self.build(&sources, &folder)?;
            }
        }
        fs::create_dir_all(cache.join("bin"))?;
        for program in self.programs {
            for link in std::iter::once(&program.name).chain(program.links) {
                relink(&folder.join(program.name), &cache.join("bin").join(link))?;
            }
        }
        Ok(())
    }

    fn hash(&self, sources: &Path) -> Result<String> {
        let mut hash = Sha256::new();
        hash.update(go(sources, &["env", "GOVERSION"])?);
        let mut files: Vec<PathBuf> = fs::read_dir(sources)
            .with_context(|| sources.display().to_string())?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<std::io::Result<_>>()?;
        files.sort();
        for file in files.iter().filter(|file| file.is_file()) {
            hash.update(
                file.file_name()
                    .expect("a listed file has a name")
                    .as_encoded_bytes(),
            );
            hash.update(fs::read(file)?);
        }
        for program in self.programs {
            hash.update(program.name);
            hash.update(program.ldflags.join(" "));
        }
        Ok(hex::encode(hash.finalize())[..16].to_owned())
    }

    /// Builds beside the final folder and renames, so that a build cut short is never taken for one.
    fn build(&self, sources: &Path, folder: &Path) -> Result<()> {
        let partial = folder.with_extension(format!("partial-{}", std::process::id()));
        fs::create_dir_all(&partial)?;
        for program in self.programs {
            let output = partial.join(program.name);
            let output = output.to_str().context("the cache's path is not UTF-8")?;
            let ldflags = format!("-ldflags=-s -w {}", program.ldflags.join(" "));
            go(
                sources,
                &[
                    "build",
                    "-trimpath",
                    &ldflags,
                    "-o",
                    output,
                    program.package,
                ],
            )?;
        }
        fs::rename(&partial, folder).with_context(|| folder.display().to_string())
    }
}

fn go(folder: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
    let output = Command::new("go")
        .args(arguments)
        .current_dir(folder)
        .env("CGO_ENABLED", "0")
        // The sources say what to build; the folder above must not change it.
        .env("GOWORK", "off")
        .output()
        .context("go: version 1.26 is needed")?;
    if !output.status.success() {
        bail!(
            "go {} failed:\n{}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(output.stdout)
}

/// Points a link at a target in one step: others may be starting the program right now.
fn relink(target: &Path, link: &Path) -> Result<()> {
    let fresh = link.with_extension(format!("new-{}", std::process::id()));
    symlink(target, &fresh).with_context(|| fresh.display().to_string())?;
    fs::rename(&fresh, link).with_context(|| link.display().to_string())
}
