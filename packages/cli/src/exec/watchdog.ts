/** Ends the command if this process is killed: the server gives the lock to others at once. */
import { spawn } from "node:child_process";
import { markName } from "./tree.ts";

/**
 * Standard input brings two lines, the command's mark and its target, and ends with the process that has its other end.
 * A process that is killed while it starts the command sends no target: then the mark alone tells who it is, and the
 * command may need a moment to have it. Members of the target's group are told once, with their group.
 */
const script = `read -r mark || exit
read -r target; read -r end
marked() {
  if [ -d /proc/1 ]; then grep -ls "${markName}=.*$mark" /proc/[0-9]*/environ | cut -d / -f 3
  else ps -A -E -o pid=,command= | sed -n "s/^ *\\([0-9]*\\) .*${markName}=[^ ]*$mark.*/\\1/p"; fi
}
group() {
  if [ -d /proc/1 ]; then sed 's/.*) . [0-9]* \\([0-9]*\\) .*/-\\1/' "/proc/$1/stat"
  else echo "-$(ps -o pgid= -p "$1" | tr -d ' ')"; fi
}
tell() {
  for pid in $(marked); do
    [ "$pid" = "$target" ] || [ "$(group "$pid")" = "$target" ] || kill "-$1" "$pid"
  done
  [ -z "$target" ] || kill "-$1" "$target"
}
there() { [ -n "$(marked)" ] || { [ -n "$target" ] && kill -0 "$target"; }; }
[ -n "$target" ] || sleep 1
tell TERM
left=$1
while [ "$left" -gt 0 ] && there; do sleep 1; left=$((left - 1)); done
there && tell KILL`;

export interface Watchdog extends Disposable {
  /** As kill(2) has it, a process or a group. */
  watch(target: number): void;
}

/**
 * To be started before the command, so that there is no moment without it. It is a shell in a session of its own, so that
 * what is sent to this process and its group does not reach it. Where there is no shell, there is no watchdog.
 */
export function watchdog(mark: string, graceMs: number): Watchdog {
  const shell = spawn("sh", ["-c", script, "sh", String(Math.ceil(graceMs / 1000))], {
    cwd: "/",
    detached: true,
    stdio: ["pipe", "ignore", "ignore"],
  });
  shell.on("error", () => {});
  shell.stdin.on("error", () => {});
  shell.unref();
  shell.stdin.write(`${mark}\n`);
  return {
    watch: (target) => void shell.stdin.write(`${target}\n`),
    [Symbol.dispose]: () => void shell.kill("SIGKILL"),
  };
}
