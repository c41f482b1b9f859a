//! Files that appear whole or not at all.

use std::io::Write;
use std::path::Path;

/// Writes `bytes` beside `path` and renames them to it, so that a reader never sees half of a file.
///
/// # Errors
/// When the folder of `path` cannot be written; an older file at `path` is then as it was.
pub fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".samebits-").suffix(".tmp");
    // Temporary files are private by default; a result is as public as the user's umask lets it be.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}
