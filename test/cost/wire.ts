/** Reads both directions of a connection, as far as it takes to count messages and statements. */
import type { CountName } from "./cost.ts";

export type WireProtocol = "postgres" | "mysql";

export interface Dialogue {
  sent(chunk: Buffer): void;
  received(chunk: Buffer): void;
  /** The server has not answered everything yet. */
  readonly isWaiting: boolean;
}

type Count = (name: CountName, n?: number) => void;

/** Cuts a stream into messages, wherever chunks end. */
class Frames {
  #rest: Buffer = Buffer.alloc(0);
  readonly #length: (rest: Buffer) => number | undefined;
  readonly #message: (message: Buffer) => void;

  /** `length`: of the message that begins here; undefined while too little of it is there. */
  constructor(length: (rest: Buffer) => number | undefined, message: (message: Buffer) => void) {
    this.#length = length;
    this.#message = message;
  }

  push(chunk: Buffer): void {
    let rest = this.#rest.length > 0 ? Buffer.concat([this.#rest, chunk]) : chunk;
    for (;;) {
      const length = this.#length(rest);
      if (length === undefined || rest.length < length) break;
      this.#message(rest.subarray(0, length));
      rest = rest.subarray(length);
    }
    this.#rest = Buffer.from(rest);
  }
}

/** A type and a length, which counts itself. */
const typed = (rest: Buffer): number | undefined => (rest.length < 5 ? undefined : 1 + rest.readUInt32BE(1));

const protocol3 = 3;

class PostgresDialogue implements Dialogue {
  readonly #requests: Frames;
  readonly #answers: Frames;
  #begun = false;
  /** Requests that end with ReadyForQuery. */
  #unanswered = 0;
  /** The client has asked for what there is so far, and goes on then. */
  #flushed = false;

  constructor(count: Count) {
    this.#requests = new Frames(
      (rest) => (this.#begun ? typed(rest) : rest.length < 8 ? undefined : rest.readUInt32BE(0)),
      (message) => {
        count("messages");
        const type = String.fromCharCode(message[0] as number);
        if (!this.#begun) {
          // What comes before it are questions that do not begin a session.
          this.#begun = message.readUInt16BE(4) === protocol3;
          if (this.#begun) this.#unanswered++;
        } else if (type === "Q" || type === "S") this.#unanswered++;
        else if (type === "H") this.#flushed = true;
      },
    );
    this.#answers = new Frames(typed, (message) => {
      const type = String.fromCharCode(message[0] as number);
      // CommandComplete: one for each statement, also of several in one text.
      if (type === "C") count("statements");
      else if (type === "Z") this.#unanswered--;
    });
  }

  sent(chunk: Buffer): void {
    this.#requests.push(chunk);
  }

  received(chunk: Buffer): void {
    this.#flushed = false;
    this.#answers.push(chunk);
  }

  get isWaiting(): boolean {
    return this.#flushed || this.#unanswered > 0;
  }
}

const comQuery = 0x03;
const comStmtExecute = 0x17;
/** The server says nothing to these. */
const withoutAnswer = new Set([0x01, 0x18, 0x19]);

/** A length of three bytes, and a number that begins at 0 with each command. */
const packet = (rest: Buffer): number | undefined =>
  rest.length < 4 ? undefined : 4 + rest.readUIntLE(0, 3);

class MysqlDialogue implements Dialogue {
  readonly #commands: Frames;
  #waiting = false;

  constructor(count: Count) {
    this.#commands = new Frames(packet, (message) => {
      if (message[3] !== 0) return;
      const command = message[4] as number;
      count("messages");
      if (command === comQuery || command === comStmtExecute) count("statements");
      if (!withoutAnswer.has(command)) this.#waiting = true;
    });
  }

  sent(chunk: Buffer): void {
    this.#commands.push(chunk);
  }

  /** On one machine an answer comes in one piece, or in pieces of one turn. */
  received(): void {
    this.#waiting = false;
  }

  get isWaiting(): boolean {
    return this.#waiting;
  }
}

export function dialogueOf(protocol: WireProtocol, count: Count): Dialogue {
  const dialogue: Dialogue = protocol === "postgres" ? new PostgresDialogue(count) : new MysqlDialogue(count);
  let spoke: "client" | "server" | undefined;
  return {
    sent(chunk) {
      if (spoke !== "client") count("roundTrips");
      spoke = "client";
      count("bytesSent", chunk.length);
      dialogue.sent(chunk);
    },
    received(chunk) {
      spoke = "server";
      count("bytesReceived", chunk.length);
      dialogue.received(chunk);
    },
    get isWaiting() {
      return dialogue.isWaiting;
    },
  };
}
