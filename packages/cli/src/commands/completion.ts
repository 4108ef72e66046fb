import { Argument, Command } from "commander";

const shells = ["bash", "zsh", "fish", "powershell"] as const;
type Shell = (typeof shells)[number];

const examples = `
Put it where your shell looks for it:

  bash        holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast
  zsh         holdfast completion zsh > "\${fpath[1]}/_holdfast"
  fish        holdfast completion fish > ~/.config/fish/completions/holdfast.fish
  powershell  holdfast completion powershell >> $PROFILE

Examples:
  source <(holdfast completion bash)
  holdfast completion zsh > ~/.zsh/_holdfast

The shell asks the command itself, so \`holdfast\` has to be on your PATH.`;

/** The script for bash takes the words from the package bash-completion, which is not everywhere. */
const wordsForBash = `if ! declare -F _get_comp_words_by_ref > /dev/null; then
_get_comp_words_by_ref() {
    words=("\${COMP_WORDS[@]}")
    cword=$COMP_CWORD
    cur=\${words[cword]}
    prev=\${words[cword - 1]}
}
fi
`;

/** To be registered last: it completes what is there by then. */
export function completion(program: Command): void {
  program
    .command("completion")
    .description("Print the script that makes a shell complete verbs and options.")
    .addArgument(new Argument("<shell>", "whose script").choices(shells))
    .addHelpText("after", examples)
    .showHelpAfterError("`holdfast completion --help` shows how to use it.")
    .action(async (shell: Shell) => {
      const words = await wordsOf(program);
      if (shell === "bash") process.stdout.write(wordsForBash);
      words.setup(program.name(), program.name(), shell);
    });
  // What the scripts ask: `holdfast complete -- demo --on`.
  program
    .command("complete", { hidden: true })
    .argument("[words...]")
    .helpOption(false)
    .action(async (words: string[]) => (await wordsOf(program)).parse(words));
}

async function wordsOf(program: Command) {
  // Loaded here, so that other verbs start without it.
  const { default: tab } = await import("@bomb.sh/tab/commander");
  // It adds commands of the names that ours have, so it gets a program of its own, with the same verbs.
  const twin = new Command(program.name()).enablePositionalOptions();
  for (const option of program.options) twin.addOption(option);
  for (const verb of program.commands) {
    const hidden = !program.createHelp().visibleCommands(program).includes(verb);
    if (verb.name() !== "completion" && !hidden) twin.addCommand(verb);
  }
  return tab(twin, { completionCommandName: "completion" });
}
