import { Inbox } from "./inbox.ts";
import { type FromWorker, plainError, type ToWorker, type WorkerFunction } from "./worker-protocol.ts";

const inbox = new Inbox();

process.on("disconnect", () => process.exit());
process.on("message", (received: ToWorker) => {
  if (received.kind === "message") inbox.put(received.name, received.payload);
  else void work(received.file, received.arg);
});

async function work(file: string, arg: unknown): Promise<void> {
  let outcome: FromWorker;
  try {
    const module: { default: WorkerFunction } = await import(file);
    const value = await module.default(arg, {
      send: (name, payload) => post({ kind: "message", name, payload }),
      receive: (name) => inbox.take(name),
    });
    outcome = { kind: "result", value };
  } catch (error) {
    outcome = { kind: "error", error: plainError(error) };
  }
  // The function may leave pools open; they must not keep the worker.
  post(outcome, () => process.exit());
}

function post(message: FromWorker, sent: (error: Error | null) => void = () => {}): void {
  process.send?.(message, sent);
}
