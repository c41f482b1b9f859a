//! A program that answers requests over the wire, started once and kept warm.

use samebits_contract::case::{Answer, Case, Status};
use samebits_contract::wire::{WireError, decode_answer, encode_request, read_frame_up_to, write_frame};
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// An answer may be this large; what claims more is not read.
const LARGEST_ANSWER: u64 = 2 << 30;

/// How to start a program.
#[derive(Clone, Debug)]
pub struct Program {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Its environment, beside that of this process.
    pub env: BTreeMap<String, String>,
    /// The folder it starts in; `None`: this process's.
    pub folder: Option<PathBuf>,
    /// What sets its patience, for messages.
    pub limit: &'static str,
}

/// A program and, while it runs, the pipes to it.
pub struct Side {
    /// The name used in tables and records.
    pub name: String,
    /// The command line that starts it, for people.
    pub command: String,
    program: Program,
    running: Option<Running>,
    /// Requests so far that were given a number.
    numbered: u64,
}

struct Running {
    child: Child,
    requests: Sender<Arc<Vec<u8>>>,
    answers: Receiver<Result<Option<Vec<u8>>, WireError>>,
    /// The last lines on its stderr, and who reads them.
    said: Arc<Mutex<VecDeque<String>>>,
    listener: JoinHandle<()>,
    /// Whether its answers repeat the number of the request; `None` before the first.
    numbers: Option<bool>,
    /// Bytes that came after the last whole answer.
    stray: Arc<AtomicU64>,
}

/// Counts what is read.
struct Counted<R> {
    pipe: R,
    count: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let bytes = self.pipe.read(into)?;
        self.count.fetch_add(bytes as u64, Ordering::AcqRel);
        Ok(bytes)
    }
}

impl Side {
    /// A program by its command line for a shell, not started yet. `env` goes before the environment of this process.
    pub fn new(name: &str, command: &str, folder: Option<&Path>, env: BTreeMap<String, String>) -> Side {
        // `exec`: the program takes the shell's place, so that ending the child ends the program.
        let shell = ["sh".to_string(), "-c".into(), format!("exec {command}")];
        let program = Program { command: shell.to_vec(), env, folder: folder.map(Into::into), limit: "--timeout" };
        Side { name: name.into(), command: command.into(), program, running: None, numbered: 0 }
    }

    /// A program, not started yet.
    pub fn of(name: &str, program: Program) -> Side {
        Side { name: name.into(), command: program.command.join(" "), program, running: None, numbered: 0 }
    }

    /// The environment it is started with, beside that of this process.
    pub fn env(&self) -> &BTreeMap<String, String> {
        &self.program.env
    }

    /// The answer to `request`, within `patience`. A program that fails is ended; the next request starts it anew.
    ///
    /// # Errors
    /// What the program did instead of answering.
    pub fn ask(&mut self, request: &Arc<Vec<u8>>, patience: Duration) -> Result<Vec<u8>, String> {
        let running = match self.running.take() {
            Some(running) => running,
            None => Running::start(&self.program)?,
        };
        // An answer that is there before it was asked for would be taken for the answer to this request.
        match running.answers.try_recv() {
            Err(TryRecvError::Empty | TryRecvError::Disconnected) | Ok(Ok(None)) => {}
            Ok(Ok(Some(_))) => return Err(running.end(format!("it wrote before it was asked: {MORE_THAN_ONE}"))),
            Ok(Err(e)) => return Err(running.end(format!("it does not write answers: {e}"))),
        }
        let stray = |running: &Running| match running.stray.load(Ordering::Acquire) {
            0 => None,
            bytes => Some(format!("{bytes} bytes on its stdout belong to no answer: {MORE_THAN_ONE}")),
        };
        if let Some(why) = stray(&running) {
            return Err(running.end(why));
        }
        // A program that has gone away is seen by its answer, which does not come.
        let _ = running.requests.send(request.clone());
        let went_wrong = match running.answers.recv_timeout(patience) {
            Ok(Ok(Some(frame))) => match stray(&running) {
                None => {
                    self.running = Some(running);
                    return Ok(frame);
                }
                Some(why) => why,
            },
            Ok(Ok(None)) | Err(RecvTimeoutError::Disconnected) => "it ended without an answer".to_string(),
            Ok(Err(e)) => format!("it does not write answers: {e}"),
            Err(RecvTimeoutError::Timeout) => {
                let came = match running.stray.load(Ordering::Acquire) {
                    0 => String::new(),
                    bytes => format!("; {bytes} bytes came that are no whole answer"),
                };
                format!("no answer within {} s; it was ended ({}){came}", patience.as_secs_f64(), self.program.limit)
            }
        };
        Err(running.end(went_wrong))
    }
}

impl Side {
    /// Answers `case` within `patience`; the request has a number, which the answer repeats or leaves out. What is no answer
    /// to it ends the program.
    ///
    /// # Errors
    /// What the program did instead of answering.
    pub fn answer(&mut self, case: &Case, patience: Duration) -> Result<Answer, String> {
        self.numbered += 1;
        let id = self.numbered;
        let mut asked = case.clone();
        asked.config.id = Some(id);
        let frame = self.ask(&Arc::new(encode_request(&asked)), patience)?;
        let answer = decode_answer(&frame).map_err(|e| format!("it does not write answers: {e}")).and_then(|answer| {
            let numbers = &mut self.running.as_mut().expect("it has just answered").numbers;
            match answer.id {
                Some(other) if other != id => {
                    Err(format!("it answers request {other} instead of {id}: {MORE_THAN_ONE}"))
                }
                // A request that could not be read has no number that could be repeated.
                None if answer.status != Status::Ok => Ok(answer),
                has if has.is_some() != *numbers.get_or_insert(has.is_some()) => Err(format!(
                    "some of its answers repeat the request's number (`id`) and some do not: {MORE_THAN_ONE}"
                )),
                _ => Ok(answer),
            }
        });
        // It may be one answer behind, and would stay so.
        answer.inspect_err(|_| self.stop())
    }

    /// Bytes of memory that the program and those it started hold; `None` where the system does not tell or it does not run.
    pub fn resident(&self) -> Option<u64> {
        resident(self.running.as_ref()?.child.id())
    }

    /// Ends the program; the next request starts it anew.
    pub fn stop(&mut self) {
        self.running = None;
    }
}

/// What it means when answers and requests do not pair.
const MORE_THAN_ONE: &str = "more than one answer to a request, or one too late";

/// Resident bytes of process `id` and its children. The sum over its mappings is exact; what `statm` says lags behind.
pub fn resident(id: u32) -> Option<u64> {
    let folder = PathBuf::from(format!("/proc/{id}"));
    let text = |file: &str| std::fs::read_to_string(folder.join(file));
    let mappings = text("smaps_rollup").unwrap_or_default();
    let exact: Option<u64> =
        mappings.lines().find_map(|line| line.strip_prefix("Rss:")?.trim().strip_suffix(" kB")?.parse().ok());
    let own = match exact {
        Some(kilobytes) => 1024 * kilobytes,
        None => 4096 * text("statm").ok()?.split(' ').nth(1)?.parse::<u64>().ok()?,
    };
    let children = text(&format!("task/{id}/children")).unwrap_or_default();
    Some(own + children.split_whitespace().filter_map(|child| resident(child.parse().ok()?)).sum::<u64>())
}

impl Running {
    fn start(program: &Program) -> Result<Running, String> {
        let (name, arguments) = program.command.split_first().ok_or("there is no command")?;
        let mut command = Command::new(name);
        command.args(arguments).envs(&program.env);
        if let Some(folder) = &program.folder {
            command.current_dir(folder);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| format!("`{name}` does not start: {e}"))?;
        let (mut stdin, stdout, stderr) = (
            child.stdin.take().expect("stdin is piped"),
            child.stdout.take().expect("stdout is piped"),
            child.stderr.take().expect("stderr is piped"),
        );
        // Each pipe has a thread of its own: none of them can make the others wait. They end with the child.
        let (requests, to_send) = channel::<Arc<Vec<u8>>>();
        std::thread::spawn(move || {
            for request in to_send {
                if write_frame(&mut stdin, &request).is_err() {
                    break;
                }
            }
        });
        // Bounded: answers that nobody asked for wait in the pipe, not in memory.
        let (came, answers) = sync_channel(1);
        let stray = Arc::new(AtomicU64::new(0));
        let count = stray.clone();
        std::thread::spawn(move || {
            let mut stdout = BufReader::with_capacity(1 << 20, Counted { pipe: stdout, count: count.clone() });
            loop {
                let frame = read_frame_up_to(&mut stdout, LARGEST_ANSWER);
                if let Ok(Some(frame)) = &frame {
                    count.fetch_sub(8 + frame.len() as u64, Ordering::AcqRel);
                }
                let last = !matches!(frame, Ok(Some(_)));
                if came.send(frame).is_err() || last {
                    break;
                }
            }
        });
        let said = Arc::new(Mutex::new(VecDeque::new()));
        let lines = said.clone();
        let listener = std::thread::spawn(move || {
            // A line without end must not fill the memory.
            let mut stderr = BufReader::new(stderr);
            let mut line = Vec::new();
            while let Ok(1..) = (&mut stderr).take(4096).read_until(b'\n', &mut line) {
                let text = String::from_utf8_lossy(&line).trim().to_string();
                line.clear();
                let mut lines = lines.lock().expect("no thread panics with it");
                if !text.is_empty() {
                    lines.push_back(text);
                }
                if lines.len() > 3 {
                    lines.pop_front();
                }
            }
        });
        Ok(Running { child, requests, answers, said, listener, numbers: None, stray })
    }

    /// Ends the program and adds its exit code and last words to `went_wrong`.
    fn end(mut self, went_wrong: String) -> String {
        // A program that is about to end by itself says with what code, and its last words may still be on the way.
        let mut status = None;
        for _ in 0..20 {
            status = self.child.try_wait().ok().flatten();
            if status.is_some() && self.listener.is_finished() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let code = status.map_or(String::new(), |status| format!(" ({status})"));
        let said = self.said.lock().expect("no thread panics with it");
        let words = said.back().map_or(String::new(), |line| format!("; its last words: {line:.200}"));
        format!("{went_wrong}{code}{words}")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
