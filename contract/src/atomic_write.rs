//! Writes to a path that a user names: a file appears whole or not at all, and nothing but a regular file is replaced.
//!
//! Symbolic links are followed to what they lead to, which need not exist yet. A regular file is written beside its place and
//! renamed to it. Devices, pipes and open descriptors (`/dev/stdout`, `/proc/self/fd/N`) are written straight.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Error, ErrorKind, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file that is being written. Dropped without [`commit`](AtomicFile::commit) it leaves the place as it was, except for what
/// a device or a pipe has taken already.
pub struct AtomicFile(Sink);

enum Sink {
    /// What is renamed to the path in the end.
    Renamed(NamedTempFile, PathBuf),
    /// A device, a pipe or an open descriptor.
    Straight(File),
}

/// What the name of a file that is being written begins and ends with.
const PREFIX: &str = ".samebits-";
const SUFFIX: &str = ".tmp";

impl AtomicFile {
    /// Starts to write to `path`. The opening of a pipe waits for its reader.
    ///
    /// A regular file that is replaced hands on its permission bits and, where the system allows it, its owner.
    ///
    /// # Errors
    /// As [`check`]; when no file can be made in the folder; when the device or pipe cannot be opened.
    pub fn create(path: &Path) -> io::Result<AtomicFile> {
        let (place, old) = destination(path)?;
        if let Some(old) = &old
            && !old.is_file()
        {
            return Ok(AtomicFile(Sink::Straight(straight(&place)?)));
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(PREFIX).suffix(SUFFIX);
        // Temporary files are private by default; a result is as public as the user's umask lets it be.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let file = builder.tempfile_in(folder_of(&place))?;
        if let Some(old) = old {
            inherit(file.as_file(), &old)?;
        }
        Ok(AtomicFile(Sink::Renamed(file, place)))
    }

    /// Brings the bytes to the disk and the file to its place.
    ///
    /// # Errors
    /// What the system says of the bytes, at the latest now, or of the place; a file that was there is then as it was.
    pub fn commit(self) -> io::Result<()> {
        match self.0 {
            Sink::Straight(file) => sync(&file),
            Sink::Renamed(file, place) => {
                // An error of closing has nothing left to tell after this.
                sync(file.as_file())?;
                file.persist(&place)?;
                #[cfg(unix)]
                sync(&File::open(folder_of(&place))?)?;
                Ok(())
            }
        }
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Sink::Straight(file) => file.write(bytes),
            Sink::Renamed(file, _) => file.as_file_mut().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes `bytes` to `path`.
///
/// # Errors
/// Those of [`AtomicFile`].
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes)?;
    file.commit()
}

/// Whether `path` can be written as far as can be told without writing: for asking before long work.
///
/// # Errors
/// When `path` leads to a folder, into a folder that is not there, or in a circle.
pub fn check(path: &Path) -> io::Result<()> {
    destination(path).map(drop)
}

/// Makes the folder `path` and those above it where they are missing; a link is followed to a folder that need not exist yet.
///
/// # Errors
/// When `path` leads to something else than a folder, or the folder cannot be made.
pub fn create_folder(path: &Path) -> io::Result<()> {
    let (place, found) = follow(path)?;
    match found {
        Some(found) if found.is_dir() => Ok(()),
        Some(_) => Err(Error::new(ErrorKind::NotADirectory, "is not a folder; name a folder")),
        None => fs::create_dir_all(place),
    }
}

/// The regular file that `path` leads to, there or not: for what is written over time and read again.
///
/// # Errors
/// As [`check`], and when `path` leads to a device, a pipe or an open descriptor.
pub fn regular(path: &Path) -> io::Result<PathBuf> {
    match destination(path)? {
        (_, Some(found)) if !found.is_file() => {
            Err(Error::new(ErrorKind::InvalidInput, "is a device or a pipe; it must be a regular file"))
        }
        (place, _) => Ok(place),
    }
}

/// Removes the files in `folder` that a killed program was about to write there.
///
/// # Errors
/// When the folder cannot be read or a file cannot be removed.
pub fn remove_leftovers(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(PREFIX) && name.ends_with(SUFFIX) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Removes the regular file that `path` leads to, if there is one; links, devices and pipes stay.
///
/// # Errors
/// As [`check`], and when the file cannot be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match destination(path)? {
        (place, Some(found)) if found.is_file() => fs::remove_file(place),
        _ => Ok(()),
    }
}

/// What a write to `path` reaches, and what is there now; of an open descriptor, the link in /proc.
fn destination(path: &Path) -> io::Result<(PathBuf, Option<Metadata>)> {
    let (place, found) = follow(path)?;
    let folder = folder_of(&place);
    match &found {
        Some(found) if found.is_dir() => Err(Error::new(ErrorKind::IsADirectory, "is a folder; name a file")),
        None if place.file_name().is_none() || place.as_os_str().as_encoded_bytes().ends_with(b"/") => {
            Err(Error::new(ErrorKind::InvalidInput, "name a file"))
        }
        None if !folder.is_dir() => {
            let why = format!("{} is not a folder; create it first", folder.display());
            Err(Error::new(ErrorKind::NotFound, why))
        }
        _ => Ok((place, found)),
    }
}

/// As many links in a row as Linux follows.
const LINKS: usize = 40;

/// Follows symbolic links to the first thing that is none, which need not exist, or to a link that stands for an open
/// descriptor: its text does not name what it leads to.
fn follow(path: &Path) -> io::Result<(PathBuf, Option<Metadata>)> {
    let mut place = path.to_path_buf();
    for _ in 0..=LINKS {
        let found = match fs::symlink_metadata(&place) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok((place, None)),
            found => found?,
        };
        if !found.is_symlink() || is_descriptor(&found) {
            return Ok((place, Some(found)));
        }
        place = folder_of(&place).join(fs::read_link(&place)?);
    }
    Err(Error::other(format!("leads through more than {LINKS} symbolic links")))
}

/// The folder that `path` stands in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether a symbolic link is one of /proc.
fn is_descriptor(link: &Metadata) -> bool {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::MetadataExt;
        fs::metadata("/proc/self").is_ok_and(|proc| proc.dev() == link.dev())
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = link;
        false
    }
}

/// Opens what is no regular file for writing.
fn straight(place: &Path) -> io::Result<File> {
    #[cfg(unix)]
    {
        use std::os::fd::AsFd;
        // Of stdout and stderr a copy of the descriptor: opening anew would begin at byte 0 of a file, and cannot open a socket.
        let own = |number: &str| {
            let folder = fs::canonicalize("/proc/self/fd").ok();
            place.file_name().is_some_and(|name| name == number)
                && folder.is_some_and(|own| fs::canonicalize(folder_of(place)).is_ok_and(|folder| folder == own))
        };
        if own("1") {
            io::stdout().flush()?;
            return Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?));
        }
        if own("2") {
            return Ok(File::from(io::stderr().as_fd().try_clone_to_owned()?));
        }
    }
    let found = fs::metadata(place)?;
    // A file behind another descriptor keeps what it has.
    OpenOptions::new().write(true).append(found.is_file()).open(place)
}

/// Gives `file` what stays of `old`, which it replaces.
#[cfg(unix)]
fn inherit(file: &File, old: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
    let new = file.metadata()?;
    if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
        // Who may not give files away becomes the owner, as of a new file.
        let _ = fchown(file, Some(old.uid()), Some(old.gid()));
    }
    file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o777))
}

#[cfg(not(unix))]
fn inherit(_: &File, _: &Metadata) -> io::Result<()> {
    Ok(())
}

/// Waits until the bytes of `file` are on the disk; pipes and most devices have no such thing.
fn sync(file: &File) -> io::Result<()> {
    match file.sync_all() {
        Err(e) if matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        done => done,
    }
}

#[cfg(all(feature = "unit-tests", unix))]
pub(crate) mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub(crate) fn a_file_is_replaced_whole_and_keeps_its_permissions() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4640)).unwrap();
        let mut half = AtomicFile::create(&path).unwrap();
        half.write_all(b"half").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        drop(half);
        assert_eq!((fs::read(&path).unwrap(), names(dir.path())), (b"old".to_vec(), vec!["file".to_string()]));
        write(&path, b"new").unwrap();
        assert_eq!((fs::read(&path).unwrap(), names(dir.path())), (b"new".to_vec(), vec!["file".to_string()]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
    }

    pub(crate) fn links_are_followed_and_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (here, there) = (dir.path().join("here"), dir.path().join("there"));
        fs::create_dir_all(&here).unwrap();
        fs::create_dir_all(&there).unwrap();
        let file = there.join("file");
        symlink("../there/file", here.join("relative")).unwrap();
        symlink(&file, here.join("absolute")).unwrap();
        symlink("relative", here.join("chain")).unwrap();
        for (round, link) in ["chain", "relative", "absolute"].into_iter().enumerate() {
            // The first time the link dangles.
            assert_eq!(file.exists(), round > 0);
            write(&here.join(link), link.as_bytes()).unwrap();
            assert_eq!(fs::read(&file).unwrap(), link.as_bytes());
            assert!(fs::symlink_metadata(&file).unwrap().is_file());
        }
        remove(&here.join("chain")).unwrap();
        remove(&here.join("chain")).unwrap();
        assert!(!file.exists());
        assert_eq!(names(&here), ["absolute", "chain", "relative"]);
        assert!(names(&here).iter().all(|name| fs::symlink_metadata(here.join(name)).unwrap().is_symlink()));

        symlink("../there/new/er", here.join("folder")).unwrap();
        create_folder(&here.join("folder")).unwrap();
        create_folder(&here.join("folder")).unwrap();
        assert!(there.join("new/er").is_dir());
    }

    pub(crate) fn what_cannot_be_a_file_is_said_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        symlink("b", dir.path().join("a")).unwrap();
        symlink("a", dir.path().join("b")).unwrap();
        symlink("gone/file", dir.path().join("far")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let before = names(dir.path());
        for (path, why) in [
            (".", "is a folder; name a file"),
            ("gone/file", "gone is not a folder; create it first"),
            ("far", "gone is not a folder; create it first"),
            ("a", "more than 40 symbolic links"),
            ("new/", "name a file"),
            ("file/new", "Not a directory"),
        ] {
            let path = dir.path().join(path);
            for error in [check(&path), write(&path, b"").map(drop)] {
                let error = error.unwrap_err().to_string();
                assert!(error.contains(why), "{}: {error}", path.display());
            }
        }
        assert!(create_folder(&dir.path().join("file")).unwrap_err().to_string().contains("is not a folder"));
        assert_eq!(check(Path::new("")).unwrap_err().to_string(), "name a file");
        assert_eq!(names(dir.path()), before);
    }
}
