//! What an X.509 certificate says that webpki keeps to itself: its version, validity, public key
//! and the hash of its signature. Just enough DER to find them. Knows nothing of trust: nothing
//! here decides whether a certificate is good.

use std::cmp::Ordering;

use ring::digest;
use rustls::pki_types::{SubjectPublicKeyInfoDer, UnixTime};

use crate::users::timestamp::Timestamp;

/// The few fields of a DER certificate that `tls` asks for.
pub struct Certificate<'a> {
    der: &'a [u8],
    /// Whether it is of X.509 version 1, that is, without extensions. webpki refuses to look at it.
    pub is_version_1: bool,
    /// Whether it names the same issuer and subject, as one that signed itself does.
    pub is_self_issued: bool,
    not_before: u64,
    not_after: u64,
    /// The public key.
    pub public_key: SubjectPublicKeyInfoDer<'a>,
    signature_algorithm: &'a [u8],
}

impl<'a> Certificate<'a> {
    /// Finds the fields; `None` when `der` is not a certificate.
    pub fn parse(der: &'a [u8]) -> Option<Certificate<'a>> {
        let certificate = Element::first(der, SEQUENCE)?;
        let signed = Element::first(certificate.content, SEQUENCE)?;
        let signature_algorithm = Element::first(signed.rest, SEQUENCE)?;
        let version = Element::first(signed.content, VERSION);
        let fields = version.as_ref().map_or(signed.content, |v| v.rest);
        let serial = Element::first(fields, INTEGER)?;
        let signature = Element::first(serial.rest, SEQUENCE)?;
        let issuer = Element::first(signature.rest, SEQUENCE)?;
        let validity = Element::first(issuer.rest, SEQUENCE)?;
        let subject = Element::first(validity.rest, SEQUENCE)?;
        let public_key = Element::first(subject.rest, SEQUENCE)?;
        let (not_before, rest) = time(validity.content)?;
        let (not_after, _) = time(rest)?;
        Some(Certificate {
            der,
            is_version_1: version.is_none(),
            is_self_issued: issuer.whole == subject.whole,
            not_before,
            not_after,
            public_key: public_key.whole.into(),
            signature_algorithm: Element::first(signature_algorithm.content, OBJECT_ID)?.content,
        })
    }

    /// Whether `now` lies before (`Less`), within (`Equal`) or after (`Greater`) the validity.
    pub fn validity(&self, now: UnixTime) -> Ordering {
        match now.as_secs() {
            now if now < self.not_before => Ordering::Less,
            now if now > self.not_after => Ordering::Greater,
            _ => Ordering::Equal,
        }
    }

    /// The `tls-server-end-point` channel binding of RFC 5929: the certificate, hashed with its own
    /// signature's hash, or SHA-256 where that is MD5 or SHA-1. `None` where the algorithm names no
    /// hash (Ed25519) or hides it in its parameters (RSA-PSS).
    pub fn end_point_hash(&self) -> Option<Vec<u8>> {
        const PKCS_1: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1];
        const ECDSA_WITH: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4];
        let oid = self.signature_algorithm;
        let hash = match (oid.strip_prefix(PKCS_1), oid.strip_prefix(ECDSA_WITH)) {
            (Some([4 | 5 | 11]), _) | (_, Some([1] | [3, 2])) => &digest::SHA256,
            (Some([12]), _) | (_, Some([3, 3])) => &digest::SHA384,
            (Some([13]), _) | (_, Some([3, 4])) => &digest::SHA512,
            _ => return None,
        };
        Some(digest::digest(hash, self.der).as_ref().to_vec())
    }
}

const INTEGER: u8 = 0x02;
const OBJECT_ID: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;

/// One DER element: tag, length, content.
#[derive(Clone, Copy)]
struct Element<'a> {
    whole: &'a [u8],
    content: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Element<'a> {
    /// The element at the start of `input`, if it carries `tag`.
    fn first(input: &'a [u8], tag: u8) -> Option<Element<'a>> {
        let (&[found, short], body) = input.split_first_chunk()?;
        let (length, body) = match short {
            0..=0x7f => (usize::from(short), body),
            0x81..=0x83 => {
                let (bytes, body) = body.split_at_checked(usize::from(short & 0x7f))?;
                let length = bytes.iter().fold(0, |l, &b| l << 8 | usize::from(b));
                (length, body)
            }
            _ => return None,
        };
        let (content, rest) = body.split_at_checked(length)?;
        let whole = &input[..input.len() - rest.len()];
        (found == tag).then_some(Element { whole, content, rest })
    }
}

/// The time at the start of `input` in seconds since 1970 (0 for earlier ones), and what follows it.
/// RFC 5280 allows `YYMMDDhhmmssZ` and `YYYYMMDDhhmmssZ`.
fn time(input: &[u8]) -> Option<(u64, &[u8])> {
    let (element, century) = match Element::first(input, UTC_TIME) {
        Some(utc) => (utc, if utc.content < &b"5"[..] { "20" } else { "19" }),
        None => (Element::first(input, GENERALIZED_TIME)?, ""),
    };
    let text = format!("{century}{}", str::from_utf8(element.content).ok()?);
    if text.len() != 15 || !text.is_ascii() || !text.ends_with('Z') {
        return None;
    }
    let field = |at: usize| &text[at..at + 2];
    let time = format!("{}-{}-{}T{}:{}:{}", &text[..4], field(4), field(6), field(8), field(10), &text[12..]);
    let seconds = Timestamp::parse(&time)?.unix_micros() / 1_000_000;
    Some((seconds.max(0).cast_unsigned(), element.rest))
}

#[cfg(test)]
mod tests {
    use super::time;

    #[test]
    fn times() {
        let der = |tag: u8, text: &str| [&[tag, text.len() as u8], text.as_bytes()].concat();
        for (tag, text, seconds) in [
            (0x17, "700101000000Z", Some(0)),
            (0x17, "491231235959Z", Some(2_524_607_999)),
            (0x17, "500101000000Z", Some(0)),
            (0x18, "20240229120001Z", Some(1_709_208_001)),
            (0x18, "20500101000000Z", Some(2_524_608_000)),
            (0x18, "99991231235959Z", Some(253_402_300_799)),
            (0x18, "20240229120001", None),
            (0x17, "2402291200+1Z", None),
            (0x04, "240229120001Z", None),
        ] {
            assert_eq!(time(&der(tag, text)).map(|t| t.0), seconds, "{text}");
        }
        assert!(time(&[0x17, 0x0d, b'2']).is_none());
        assert!(time(&[]).is_none());
    }
}
