//! A program that answers requests over the wire, started once and kept warm.

use samebits_contract::wire::{WireError, read_frame_up_to, write_frame};
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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
}

struct Running {
    child: Child,
    requests: Sender<Arc<Vec<u8>>>,
    answers: Receiver<Result<Option<Vec<u8>>, WireError>>,
    /// The last lines on its stderr, and who reads them.
    said: Arc<Mutex<VecDeque<String>>>,
    listener: JoinHandle<()>,
}

impl Side {
    /// A program by its command line for a shell, not started yet.
    pub fn new(name: &str, command: &str, folder: Option<&Path>) -> Side {
        // `exec`: the program takes the shell's place, so that ending the child ends the program.
        let shell = ["sh".to_string(), "-c".into(), format!("exec {command}")];
        let program = Program {
            command: shell.to_vec(),
            env: BTreeMap::new(),
            folder: folder.map(Into::into),
            limit: "--timeout",
        };
        Side { name: name.into(), command: command.into(), program, running: None }
    }

    /// A program, not started yet.
    pub fn of(name: &str, program: Program) -> Side {
        Side { name: name.into(), command: program.command.join(" "), program, running: None }
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
            Ok(Ok(Some(_))) => return Err(running.end("it wrote more than one answer to the request before".into())),
            Ok(Err(e)) => return Err(running.end(format!("it writes something else than answers: {e}"))),
        }
        // A program that has gone away is seen by its answer, which does not come.
        let _ = running.requests.send(request.clone());
        let went_wrong = match running.answers.recv_timeout(patience) {
            Ok(Ok(Some(frame))) => {
                self.running = Some(running);
                return Ok(frame);
            }
            Ok(Ok(None)) | Err(RecvTimeoutError::Disconnected) => "it ended without an answer".to_string(),
            Ok(Err(e)) => format!("it does not write answers: {e}"),
            Err(RecvTimeoutError::Timeout) => {
                format!("no answer within {} s; it was ended ({})", patience.as_secs_f64(), self.program.limit)
            }
        };
        Err(running.end(went_wrong))
    }
}

impl Side {
    /// Ends the program; the next request starts it anew.
    pub fn stop(&mut self) {
        self.running = None;
    }
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
        std::thread::spawn(move || {
            let mut stdout = BufReader::with_capacity(1 << 20, stdout);
            loop {
                let frame = read_frame_up_to(&mut stdout, LARGEST_ANSWER);
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
        Ok(Running { child, requests, answers, said, listener })
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
