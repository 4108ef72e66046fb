/** One of the sessions that a probe plays against each other. It answers in time, or it is ended. */
import { NoAnswer, within } from "../within.ts";
import type { Row, Session } from "../server.ts";

/** Longer than any wait that a probe asks the server for. */
export const answerMs = 15_000;

export class Caller implements AsyncDisposable {
  readonly #session: Session;
  #ended = false;

  constructor(session: Session) {
    this.#session = session;
  }

  /** `ms`: how long the answer may take. */
  async query(text: string, ms = answerMs): Promise<Row[]> {
    try {
      return await within(ms, this.#session.query(text));
    } catch (error) {
      if (error instanceof NoAnswer) this.destroy();
      throw error;
    }
  }

  /** As if its process had died. */
  destroy(): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#session.destroy();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#ended) return;
    this.#ended = true;
    try {
      await within(1000, Promise.resolve(this.#session[Symbol.asyncDispose]()));
    } catch {
      this.#session.destroy();
    }
  }
}
