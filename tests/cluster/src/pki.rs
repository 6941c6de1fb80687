//! Keys, certificates and tokens of one cluster, made by openssl and thrown away with it.

use std::fmt::Write as _;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use anyhow::Context;
use serde_json::json;

use crate::program;

/// Nothing of the machine's own settings gets into the certificates.
const SETTINGS: &str = "
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, digitalSignature
[server]
basicConstraints = critical, CA:FALSE
extendedKeyUsage = serverAuth
subjectAltName = IP:127.0.0.1, IP:10.77.0.1, IP:10.96.0.1, DNS:localhost, DNS:kubernetes.default.svc
[client]
basicConstraints = critical, CA:FALSE
extendedKeyUsage = clientAuth
";

/// Somebody whom the API server knows by a token.
pub(crate) struct User {
    /// Names the file of the kubeconfig.
    pub(crate) file: String,
    /// Who that is.
    pub(crate) name: String,
    /// Of which group; none if empty.
    pub(crate) group: String,
}

impl User {
    pub(crate) fn new(file: impl Into<String>, name: impl Into<String>, group: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            name: name.into(),
            group: group.into(),
        }
    }
}

/// Writes `ca.crt`, `server.{crt,key}`, `client.{crt,key}` (the API server as a client of kubelets) and
/// `accounts.{key,pub}` (what tokens of service accounts are signed with).
pub(crate) fn make(folder: &Path) -> anyhow::Result<()> {
    fs::write(folder.join("openssl.cnf"), SETTINGS)?;
    let certificate = |name: &str, subject: &str, extensions: &str, issuer: &[&str]| {
        openssl(
            folder,
            &[
                "req",
                "-x509",
                "-config",
                "openssl.cnf",
                "-days",
                "3650",
                "-nodes",
                "-newkey",
                "ec",
            ],
        )
        .args([
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-subj",
            subject,
            "-extensions",
            extensions,
        ])
        .args(["-keyout", &format!("{name}.key"), "-out", &format!("{name}.crt")])
        .args(issuer)
        .run()
    };
    let ca = ["-CA", "ca.crt", "-CAkey", "ca.key"];
    certificate("ca", "/CN=holdfast-cluster", "ca", &[])?;
    certificate("server", "/CN=kube-apiserver", "server", &ca)?;
    certificate("client", "/O=system:masters/CN=kube-apiserver", "client", &ca)?;
    openssl(
        folder,
        &[
            "genpkey",
            "-algorithm",
            "EC",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
        ],
    )
    .args(["-out", "accounts.key"])
    .run()?;
    openssl(
        folder,
        &["pkey", "-in", "accounts.key", "-pubout", "-out", "accounts.pub"],
    )
    .run()
}

/// Writes `tokens.csv`, and for each user a kubeconfig `USER.kubeconfig`.
pub(crate) fn users(folder: &Path, server: &str, users: &[User]) -> anyhow::Result<()> {
    let mut list = String::new();
    for (number, user) in users.iter().enumerate() {
        let token = token()?;
        writeln!(list, "{token},{},{number},{}", user.name, user.group)?;
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "holdfast",
            "contexts": [{"name": "holdfast", "context": {"cluster": "holdfast", "user": user.file}}],
            "clusters": [{"name": "holdfast", "cluster": {"server": server, "certificate-authority": folder.join("ca.crt")}}],
            "users": [{"name": user.file, "user": {"token": token}}],
        });
        fs::write(
            folder.join(format!("{}.kubeconfig", user.file)),
            config.to_string(),
        )?;
    }
    fs::write(folder.join("tokens.csv"), list)?;
    Ok(())
}

fn token() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    fs::File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut bytes))
        .context("cannot read /dev/urandom")?;
    Ok(bytes
        .iter()
        .fold(String::new(), |text, byte| format!("{text}{byte:02x}")))
}

struct OpenSsl(Command);

fn openssl(folder: &Path, words: &[&str]) -> OpenSsl {
    let mut command = Command::new("openssl");
    command.current_dir(folder).args(words);
    OpenSsl(command)
}

impl OpenSsl {
    fn args(mut self, words: impl IntoIterator<Item = impl AsRef<std::ffi::OsStr>>) -> Self {
        self.0.args(words);
        self
    }

    fn run(mut self) -> anyhow::Result<()> {
        program::run(&mut self.0, None).map(drop)
    }
}
