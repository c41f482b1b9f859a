//! Pictures as PNG files: RGB of eight bits, rows as they are, in blocks that are not compressed.

/// Most bytes of such a block.
const BLOCK: usize = 0xFFFF;

/// `rgb[height * width * 3]` as a file.
pub fn encode([height, width]: [usize; 2], rgb: &[u8]) -> Vec<u8> {
    assert_eq!(rgb.len(), height * width * 3, "three bytes for each place");
    let extents = [width, height].map(|extent| u32::try_from(extent).expect("an image fits its header").to_be_bytes());
    // Each row begins with how it was changed, which is not at all.
    let rows: Vec<u8> = rgb.chunks((width * 3).max(1)).flat_map(|row| [&[0], row].concat()).collect();
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    // Eight bits of red, green and blue.
    chunk(&mut file, *b"IHDR", &[&extents.concat()[..], &[8, 2, 0, 0, 0]].concat());
    chunk(&mut file, *b"IDAT", &stored(&rows));
    chunk(&mut file, *b"IEND", &[]);
    file
}

/// A part of a file: its length, its name, the bytes, and the remainder of both.
fn chunk(file: &mut Vec<u8>, name: [u8; 4], bytes: &[u8]) {
    let named = [&name, bytes].concat();
    file.extend(u32::try_from(bytes.len()).expect("a picture has less than 4 GiB").to_be_bytes());
    file.extend(&named);
    file.extend(remainder(&named).to_be_bytes());
}

/// Bytes as a stream of zlib (RFC 1950) whose blocks are stored (RFC 1951).
fn stored(bytes: &[u8]) -> Vec<u8> {
    let mut stream = vec![0x78, 0x01];
    let count = bytes.len().div_ceil(BLOCK);
    for (number, block) in bytes.chunks(BLOCK).enumerate() {
        let length = block.len() as u16;
        stream.push(u8::from(number + 1 == count));
        stream.extend([length.to_le_bytes(), (!length).to_le_bytes()].concat());
        stream.extend(block);
    }
    let (mut a, mut b) = (1u32, 0u32);
    for byte in bytes {
        a = (a + u32::from(*byte)) % 65521;
        b = (b + a) % 65521;
    }
    stream.extend((b << 16 | a).to_be_bytes());
    stream
}

/// The CRC-32 of bytes.
fn remainder(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| if sum & 1 == 1 { sum >> 1 ^ 0xEDB8_8320 } else { sum >> 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A red and a blue place, as a decoder of another hand read them.
    #[test]
    fn a_small_picture() {
        let file = encode([1, 2], &[255, 0, 0, 0, 0, 255]);
        assert_eq!(remainder(b"123456789"), 0xCBF4_3926);
        assert_eq!(&file[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(&file[8..33], b"\0\0\0\x0dIHDR\0\0\0\x02\0\0\0\x01\x08\x02\0\0\0\x7b\x40\xe8\xdd");
        // Adler-32 of the row: a = 1 + 510, b the sum of the seven sums.
        assert_eq!(&stored(&[0, 255, 0, 0, 0, 0, 255])[2..7], &[1, 7, 0, 0xF8, 0xFF]);
        assert_eq!(encode([300, 300], &vec![7; 270_000]).len(), 8 + 25 + 12 + 2 + 270_300 + 5 * 5 + 4 + 12);
    }
}
