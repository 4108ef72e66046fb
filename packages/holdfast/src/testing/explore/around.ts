import type { Isolation } from "../../seam/database.ts";
import type { Protocol } from "../../seam/protocol-reader.ts";
import { step } from "./actor.ts";
import type { HeldBytes, SentStep, SocketLine } from "./socket-line.ts";
import type { Alone } from "./written.ts";

/** How a transaction of ours has left its session. */
export interface After {
  readonly inside: boolean;
  /** What the server said to its COMMIT, if that failed. */
  readonly refused?: Uint8Array;
}

/** What they need of the stage. */
export interface AroundStage {
  readonly protocol: Pick<Protocol<never>, "autocommit">;
  /** Statements of which not everything is seen. */
  readonly unseen: Set<string>;
  /** The session that has marked itself so. */
  marked(name: string): Promise<string | undefined>;
  /** The client is to hear what was kept from it. */
  deliver(line: SocketLine, after: After): void;
  /** There is another step to choose. */
  changed(): void;
}

/**
 * Transactions of ours around statements that are sent outside of any, where others are to come before their COMMIT, or where
 * it makes the session known.
 */
export class Around {
  readonly #stage: AroundStage;
  #marks = 0;

  constructor(stage: AroundStage) {
    this.#stage = stage;
  }

  /** `level`: of the actors' transactions; undefined: as they come. */
  async begin(
    line: SocketLine,
    { step: { opens, text }, requests }: HeldBytes,
    { begins, fits, unseen }: Alone,
    level: Isolation | undefined,
  ): Promise<void> {
    const { autocommit } = this.#stage.protocol;
    if (unseen || requests > 1) this.#stage.unseen.add(text);
    const behind = line.self?.direct === false && autocommit.mark;
    if (requests > 1 || !(opens || (behind && (begins || fits)))) return;
    const name = `holdfast explore ${process.pid} ${++this.#marks}`;
    const texts = behind ? [autocommit.begin, ...behind(name, level)] : [autocommit.begin];
    const { error } = await line.tell(texts.join("; "));
    if (error !== undefined) return void (await line.tell(autocommit.rollback));
    if (behind) line.session = (await this.#stage.marked(name)) ?? line.session;
    line.around = { heard: [], begins, pass: undefined };
  }

  /** The answer to what was sent inside of it is complete. */
  heard(line: SocketLine, { step: sent, actor }: SentStep): void {
    const { autocommit } = this.#stage.protocol;
    const { begins } = line.around ?? {};
    if (begins) this.#stage.deliver(line, { inside: line.reader.inside !== false });
    else if (!sent.opens || sent.error !== undefined)
      void this.#end(line, sent.error === undefined ? autocommit.commit : autocommit.rollback);
    else {
      line.sent = undefined;
      sent.blocked = false;
      actor.sent.delete(sent);
      if (actor.over) return void this.commit(line);
      const ending = step(actor.index, autocommit.commit, undefined, { connection: line.id, implicit: true });
      actor.held.push({
        step: ending,
        ready: () => true,
        // It may have to wait as well: for what a deferred constraint says.
        send: () => {
          line.sent = { step: ending, actor };
          void this.commit(line);
        },
      });
      this.#stage.changed();
    }
  }

  commit(line: SocketLine): Promise<void> {
    return this.#end(line, this.#stage.protocol.autocommit.commit);
  }

  async #end(line: SocketLine, text: string): Promise<void> {
    const { error, heard } = await line.tell(text);
    if (error !== undefined && line.sent) line.sent.step.error ??= error;
    const refused = error === undefined ? {} : { refused: Buffer.concat(heard) };
    this.#stage.deliver(line, { inside: false, ...refused });
  }
}
