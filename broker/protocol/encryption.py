"""Decrypts entries that Pulsar's clients have encrypted: AES-GCM, with a key that is encrypted with RSA.

Source: `MessageCryptoBc` of Pulsar's Java client, and
https://pulsar.apache.org/docs/next/security-encryption/: the data key is encrypted by RSA-OAEP with SHA-1.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from broker.client import PulsarError
from broker.protocol.wire.pulsar_pb2 import MessageMetadata
from conf.errors import DelayLakeError
from conf.settings import PulsarSettings

_OAEP = padding.OAEP(padding.MGF1(hashes.SHA1()), hashes.SHA1(), None)  # noqa: S303 (what Pulsar's clients do)
_MOST_KEYS = 100  # that are tried for an entry, a millisecond each
_REMEMBERED = 1_000  # data keys: a producer makes a new one every four hours


class DecryptionError(DelayLakeError):
    """No key decrypts an entry."""


class Decryptor:
    """Decrypts entries with one private key. May be used in any thread.

    Args:
        private_key: an RSA key as PEM.

    Raises:
        PulsarError: that is no private RSA key.
    """

    def __init__(self, private_key: bytes) -> None:
        try:
            key = serialization.load_pem_private_key(private_key, None)
        except (TypeError, ValueError) as error:
            raise PulsarError("pulsar.crypto_private_key_file has no private key as PEM without a password") from error
        if not isinstance(key, rsa.RSAPrivateKey):
            raise PulsarError("pulsar.crypto_private_key_file has a key that is not an RSA key")
        self._key = key
        self._data_keys: dict[bytes, AESGCM] = {}

    @classmethod
    def of_settings(cls, settings: PulsarSettings) -> Decryptor | None:
        """Reads the private key that the settings name; None: they name none.

        Raises:
            PulsarError: the file can't be read, or has no private RSA key.
        """
        file = settings.crypto_private_key_file
        if file is None:
            return None
        try:
            return cls(file.read_bytes())
        except OSError as error:
            raise PulsarError(f"no private key at {file}: set pulsar.crypto_private_key_file") from error

    def decrypt(self, metadata: MessageMetadata, payload: bytes) -> bytes:
        """Returns what an entry's payload was before its encryption.

        Raises:
            DecryptionError: none of the entry's data keys is for this private key, or the payload is damaged.
        """
        for key in metadata.encryption_keys[:_MOST_KEYS]:
            cipher = self._cipher(key.value)
            if cipher is None:
                continue
            try:
                return cipher.decrypt(metadata.encryption_param, payload, None)
            except (InvalidTag, ValueError):
                continue
        raise DecryptionError

    def _cipher(self, encrypted: bytes) -> AESGCM | None:
        """Returns the cipher of an encrypted data key; None: the data key is for another private key."""
        cipher = self._data_keys.get(encrypted)
        if cipher is None:
            try:
                cipher = AESGCM(self._key.decrypt(encrypted, _OAEP))
            except ValueError:
                return None
            if len(self._data_keys) >= _REMEMBERED:
                self._data_keys.clear()
            self._data_keys[encrypted] = cipher
        return cipher
