# shellcheck shell=bash disable=SC2034,SC2154
# (the files of the library share variables)
# The whole work of a distillation's script: settings, ranks, requeue. Sourced by lib.sh.

# $1: config; the rest: arguments of megatron_lt2.distill. LT2_CONFIG, LT2_RUN_DIR, TEACHER and DATA_PATH
# (one prefix) take the place of what the file says.
lt2_distill() {
    local config="${LT2_CONFIG:-$1}" ranks run_dir before lt2_module=megatron_lt2.distill word
    local dry="${LT2_DRY_RUN:-}" lt2_chain_ids=""
    shift
    unset LT2_CONFIG
    [[ "$dry" != 0 ]] || dry=""
    [[ -f "$config" ]] || lt2_die 2 "$config: no such file"
    lt2_environment
    ranks="$(lt2_num_ranks "$(lt2_num_gpus)" "${LT2_SMOKE:-}" "$dry")" || exit $?
    run_dir="${LT2_RUN_DIR:-$(lt2_distill_folder "$config")}"
    unset LT2_RUN_DIR
    [[ -z "${DATA_PATH:-}" ]] || set -- --data.path "$DATA_PATH" "$@"
    [[ -z "${TEACHER:-}" ]] || set -- --teacher "$TEACHER" "$@"
    set -- --config "$config" --run_dir "$run_dir" "$@"
    if [[ -n "$dry" ]]; then
        export PYTHONDONTWRITEBYTECODE=1
        python -m "$lt2_module" "$@" --dry-run --world-size "$ranks" || exit $?
    fi
    if lt2_in_slurm; then
        lt2_rendezvous
        lt2_container_flags "$(realpath -m "$run_dir")"
    fi
    lt2_launch_command "$ranks" "$@"
    if [[ -n "$dry" ]]; then
        printf '\n# launch command\n'
        for word in "${lt2_command[@]}"; do printf '%s ' "$(lt2_quote "$word")"; done
        printf '\n'
        lt2_say "dry run: nothing was written"
        return
    fi
    lt2_device_settings "$(lt2_num_gpus)" 1
    if ! lt2_in_slurm; then
        # Not exec: a script may go on with another student.
        "${lt2_command[@]}"
        return
    fi
    lt2_run_job "$run_dir" "$ranks" "# $config"
}

lt2_distill_folder() { # $1: config
    python -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1])).get("run_dir", "runs/distill"))' "$1"
}

lt2_share() { # $1: tokens, $2: share of them
    awk "BEGIN { printf \"%d\", $1 * $2 }"
}
