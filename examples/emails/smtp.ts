/** A mail server that keeps what it is given, and behaves like real ones: some ask to come again, some say no. */
export class SmtpError extends Error {
  readonly status: number;

  constructor(status: number, text: string) {
    super(`${status} ${text}`);
    this.status = status;
  }

  /** 4xx: try later. 5xx: never. */
  get passing(): boolean {
    return this.status < 500;
  }
}

export interface Mail {
  /** The same for each attempt: a server that has it already knows it again. */
  readonly messageId: string;
  readonly to: string;
  readonly subject: string;
}

export class Smtp {
  readonly accepted: Mail[] = [];
  putOff = 0;
  readonly #seen = new Set<string>();

  async send(mail: Mail): Promise<void> {
    await new Promise((resolve) => setTimeout(resolve, 2));
    if (mail.to.startsWith("nobody@")) throw new SmtpError(550, `no such user: ${mail.to}`);
    // Greylisting: whoever is not known is to come again.
    if (mail.to.endsWith("@grey.example") && !this.#seen.has(mail.to)) {
      this.#seen.add(mail.to);
      this.putOff++;
      throw new SmtpError(451, "come again later");
    }
    this.accepted.push(mail);
  }
}
