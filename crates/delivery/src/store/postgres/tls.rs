//! Encrypted connections: `sslmode` and `sslrootcert` of a connection string.

use std::{error::Error, path::Path, sync::Arc};

use postgres::{Config, config::SslMode};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};
use tokio_postgres_rustls::MakeRustlsConnect;

/// What the driver does not know, and is taken out of the string before it reads it.
const OURS: [&str; 2] = ["sslmode", "sslrootcert"];

type Reason = Box<dyn Error + Send + Sync>;

/// Reads a connection string. With the configuration comes what encrypts the connection, if anything is to.
pub(super) fn read(connection: &str) -> Result<(Config, Option<MakeRustlsConnect>), Reason> {
    let (rest, [mode, root]) = take_ours(connection);
    let mut config: Config = rest.parse()?;
    let checks_name = match (mode.as_deref(), &root) {
        (None, None) | (Some("disable" | "prefer"), _) => {
            config.ssl_mode(SslMode::Disable);
            return Ok((config, None));
        }
        (None | Some("verify-full"), _) => true,
        (Some("require" | "verify-ca"), _) => false,
        (Some(other), _) => {
            return Err(format!(
                "sslmode={other} is none of disable, prefer, require, verify-ca and verify-full"
            )
            .into());
        }
    };
    let Some(root) = root else {
        let mode = mode.unwrap_or_default();
        return Err(format!(
            "sslmode={mode} needs sslrootcert, a file with the certificate of the authority that signs the server's: without \
             it, whoever answers would be believed"
        )
        .into());
    };
    config.ssl_mode(SslMode::Require);
    Ok((config, Some(connector(root.as_ref(), checks_name)?)))
}

fn connector(root: &Path, checks_name: bool) -> Result<MakeRustlsConnect, Reason> {
    let unusable = |why: &dyn std::fmt::Display| {
        let root = root.display();
        Reason::from(format!(
            "sslrootcert {root} is no file of certificates: {why}"
        ))
    };
    let mut authorities = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(root).map_err(|error| unusable(&error))? {
        let certificate = certificate.map_err(|error| unusable(&error))?;
        authorities
            .add(certificate)
            .map_err(|error| unusable(&error))?;
    }
    if authorities.is_empty() {
        return Err(unusable(&"there is none in it"));
    }
    let provider = Arc::new(ring::default_provider());
    let verifier =
        WebPkiServerVerifier::builder_with_provider(authorities.into(), Arc::clone(&provider))
            .build()?;
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let config = match checks_name {
        true => builder.with_webpki_verifier(verifier),
        false => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(WhateverItsName(verifier))),
    };
    Ok(MakeRustlsConnect::new(config.with_no_client_auth()))
}

/// Believes a server whose certificate the authority has signed, for whichever host.
#[derive(Debug)]
struct WhateverItsName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for WhateverItsName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified =
            self.0
                .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        match verified {
            // The name is looked at last, when the signatures are found to be good.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0
            .verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// The string without our parameters, and their values.
fn take_ours(connection: &str) -> (String, [Option<String>; 2]) {
    let is_url = ["postgres://", "postgresql://"]
        .iter()
        .any(|scheme| connection.starts_with(scheme));
    match is_url {
        true => take_from_url(connection),
        false => take_from_words(connection),
    }
}

fn take_from_url(url: &str) -> (String, [Option<String>; 2]) {
    let mut taken = [None, None];
    let Some((address, parameters)) = url.split_once('?') else {
        return (url.to_owned(), taken);
    };
    let mut rest = Vec::new();
    for parameter in parameters.split('&') {
        let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        match OURS.iter().position(|ours| *ours == key) {
            Some(at) => taken[at] = Some(percent_decoded(value)),
            None => rest.push(parameter),
        }
    }
    match rest[..] {
        [] => (address.to_owned(), taken),
        _ => (format!("{address}?{}", rest.join("&")), taken),
    }
}

fn percent_decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2);
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend(&part.as_bytes()[2..]);
            }
            None => bytes.extend([b"%", part.as_bytes()].concat()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `key = value` words; a value may be in single quotes, and `\` takes the next character as it is.
fn take_from_words(words: &str) -> (String, [Option<String>; 2]) {
    let mut taken = [None, None];
    let mut left = String::new();
    let mut rest = words.trim_start();
    while let Some((key, behind)) = rest.split_once('=') {
        let value = Value::read(behind.trim_start());
        match OURS.iter().position(|ours| *ours == key.trim_end()) {
            Some(at) => taken[at] = Some(value.text),
            None => {
                left.push_str(&rest[..rest.len() - value.rest.len()]);
                left.push(' ');
            }
        }
        rest = value.rest.trim_start();
    }
    left.push_str(rest);
    (left, taken)
}

struct Value<'a> {
    text: String,
    rest: &'a str,
}

impl<'a> Value<'a> {
    fn read(from: &'a str) -> Self {
        let unquoted = from.strip_prefix('\'');
        let inside = unquoted.unwrap_or(from);
        let mut text = String::new();
        let mut is_escaped = false;
        for (at, character) in inside.char_indices() {
            let is_end = match unquoted {
                Some(_) => character == '\'',
                None => character.is_whitespace(),
            };
            if is_end && !is_escaped {
                let behind = at + usize::from(unquoted.is_some());
                return Self {
                    text,
                    rest: &inside[behind..],
                };
            }
            is_escaped = character == '\\' && !is_escaped;
            if !is_escaped {
                text.push(character);
            }
        }
        Self { text, rest: "" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn took(connection: &str) -> (String, Option<String>, Option<String>) {
        let (rest, [mode, root]) = take_ours(connection);
        (rest, mode, root)
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn our_parameters_are_taken_and_the_others_left_as_they_are() {
        for (connection, rest, mode, root) in [
            ("host=/run user=a", "host=/run user=a ", None, None),
            (
                "sslmode=verify-ca host=h  sslrootcert = '/a b/it\\'s.pem' password='x y'",
                "host=h password='x y' ",
                some("verify-ca"),
                some("/a b/it's.pem"),
            ),
            (
                "password=a\\ b sslmode=require",
                "password=a\\ b ",
                some("require"),
                None,
            ),
            ("host=h nonsense", "host=h nonsense", None, None),
            (
                "postgres://u@h/d?connect_timeout=3&sslmode=verify-full&sslrootcert=%2Fa%20b.pem",
                "postgres://u@h/d?connect_timeout=3",
                some("verify-full"),
                some("/a b.pem"),
            ),
            (
                "postgresql://h?sslmode=disable",
                "postgresql://h",
                some("disable"),
                None,
            ),
        ] {
            assert_eq!(
                took(connection),
                (rest.to_owned(), mode, root),
                "{connection}"
            );
        }
    }

    #[test]
    fn what_would_believe_anybody_is_refused() {
        for (connection, why) in [
            (
                "host=h sslmode=require",
                "sslmode=require needs sslrootcert",
            ),
            ("host=h sslmode=verify-full", "needs sslrootcert"),
            ("host=h sslmode=allow", "sslmode=allow is none of"),
            (
                "host=h sslrootcert=/nowhere",
                "sslrootcert /nowhere is no file",
            ),
            ("host=h sslrootcert=/dev/null", "there is none in it"),
        ] {
            let Err(error) = read(connection) else {
                panic!("{connection}");
            };
            assert!(error.to_string().contains(why), "{error}");
        }
        for connection in ["host=h", "host=h sslmode=prefer", "host=h sslmode=disable"] {
            let (config, connector) = read(connection).unwrap();
            assert!(connector.is_none() && config.get_ssl_mode() == SslMode::Disable);
        }
    }
}
